"""The endpoint `/v1/messages`: chats in the words of Anthropic's API.

``reading.py`` makes a chat's fields of a body, ``writing.py`` a message or the events
of a stream from the result.
"""
