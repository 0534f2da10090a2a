"""What a line of a batch or a client's body asks for.

``showing.py`` reads all of it: ``fields.py`` (each is served, or refused by name),
``body.py`` (what the engine is asked: ``prompts.py``, ``tools.py``), ``languages.py``
and ``rules.py`` (what steers the texts), and what a reply shows.
"""
