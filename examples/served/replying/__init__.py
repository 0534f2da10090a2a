"""From the engine's arguments to a reply, whole or streamed.

``answers.py`` waits for the engine (``known.py`` does without it). ``replies.py``
writes texts and chats, ``kinds.py`` has the forms of all endpoints. ``calls.py`` are
calls of tools in a text, ``logprobs.py`` log-probabilities (``scoring.py`` of texts
that are there, ``spelling.py`` the bytes of tokens).
"""
