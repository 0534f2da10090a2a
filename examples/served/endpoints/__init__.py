"""HTTP endpoints and connections.

``continuing.py`` has the endpoints that generate, ``tokens.py`` those of the tokenizer,
and ``describing.py`` model, health and metrics. ``gate.py`` has middleware, and
``connections.py`` uvicorn's connections with limits.
"""
