"""Parsing of a batch line or request body.

``showing.py`` is the entry point. ``fields.py`` refuses unsupported fields, ``body.py``
returns the engine's arguments (with ``prompts.py`` and ``tools.py``), and
``languages.py`` and ``rules.py`` return logits processors.
"""
