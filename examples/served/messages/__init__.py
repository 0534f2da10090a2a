"""The endpoint `/v1/messages`: chats in the format of Anthropic's API.

``reading.py`` converts a body into a chat's fields, ``writing.py`` writes the reply, a
message or a stream of events.
"""
