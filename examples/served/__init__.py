"""What `examples/serve_batch.py` and `examples/serve_http.py` are made of.

Rooms in reading order: ``loading.py`` (a checkpoint becomes an engine), ``asking``
(what a line of a batch or a client's body asks of the engine, field by field; where it
cannot be, ``mistakes.py`` says so), ``steering`` (what steers texts: grammars that come
and go, rules of single requests), ``replying`` (what came of texts, and what the model
says of texts that are there), ``endpoints`` (from a connection to an answer) and
``responses`` (one of them, in words of its own), which ``api.py`` puts together.

``running.py`` is the server's end, ``renewing.py`` its new weights, ``processes.py``
several that share a model, ``display.py`` the progress of a file of prompts, which
`examples/batching` answers.
"""
