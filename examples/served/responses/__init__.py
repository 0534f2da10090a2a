"""The endpoint `/v1/responses`: chats in other words, of which nothing is stored.

``reading.py`` makes a chat's fields of a body, ``writing.py`` a response, or the events
of a stream, of what comes.
"""
