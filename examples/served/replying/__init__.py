"""Replies, whole or streamed.

``answers.py`` submits requests to the engine and reads their events; ``known.py``
answers without it. ``replies.py`` writes completions and chats, and ``kinds.py`` lists
all endpoints. ``calls.py`` parses tool calls, ``logprobs.py`` writes log-probabilities
(``scoring.py`` computes those of given sequences), ``spelling.py`` has token bytes.
"""
