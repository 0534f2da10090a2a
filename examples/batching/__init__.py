"""Implementation of `examples/serve_batch.py`.

``command.py`` runs the command, ``answering.py`` the engine. ``forms.py`` parses lines
and formats results, ``lines.py`` stores results.
"""
