"""The endpoint `/v1/responses`: chats with other field names; nothing is stored.

``reading.py`` converts a body into a chat's fields, ``writing.py`` writes the reply, a
response or a stream of events. ``offered.py`` converts tools.
"""
