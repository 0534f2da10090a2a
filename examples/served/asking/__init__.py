"""Request options of a batch line or a client's body.

``showing.py`` reads all of it: ``fields.py`` (each is served, or refused by name),
``body.py`` (arguments of the engine: ``prompts.py``, ``tools.py``), ``languages.py``
and ``rules.py`` (logits processors), and the fields that a reply shows.
"""
