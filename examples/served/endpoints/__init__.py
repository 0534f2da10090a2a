"""From a connection to an answer.

``continuing.py`` continues texts; ``tokens.py`` and ``describing.py`` tell of the
tokenizer and of the server. ``gate.py`` stands before them, and ``connections.py`` are
uvicorn's, with limits.
"""
