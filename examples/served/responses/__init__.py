"""The endpoint `/v1/responses`: chats with other names, stored nowhere.

``reading.py`` makes a chat's fields of a body, ``writing.py`` a response or the events
of a stream from the result.
"""
