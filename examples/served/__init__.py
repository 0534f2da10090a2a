"""What `examples/serve_batch.py` and `examples/serve_http.py` are made of.

Files in reading order: ``loading.py`` (a checkpoint becomes an engine), ``asking.py``
(what a line or a client asks for), ``lines.py`` (results that survive an interrupt),
``batch.py`` and ``display.py`` (a file of prompts), ``replies.py`` and ``api.py`` (the
endpoints of OpenAI's API).
"""
