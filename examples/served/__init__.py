"""What `examples/serve_batch.py` and `examples/serve_http.py` are made of.

Files in reading order: ``loading.py`` (a checkpoint becomes an engine), ``asking.py``
(what a line or a client asks of the engine: ``prompts.py``, ``values.py``,
``languages.py`` for what texts must be, and ``mistakes.py`` where it cannot be),
``processes.py`` (several that share a model), ``display.py`` (progress of a file of
prompts, which `examples/batching` answers).

The endpoints of OpenAI's API: ``api.py``, then a request's way through ``gate.py`` (the
key, the body), ``showing.py`` and ``fields.py`` (each field is served, or refused by
name), ``answers.py`` (the engine) and ``replies.py``; ``connections.py`` are uvicorn's,
with limits; ``running.py`` is the server's end, ``renewing.py`` its new weights.
"""
