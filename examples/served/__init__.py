"""Parts of `examples/serve_batch.py` and `examples/serve_http.py`.

In reading order: ``loading.py`` (a checkpoint becomes an engine), ``asking`` (fields of
a batch line or a client's body become arguments of the engine; ``mistakes.py`` holds
the errors), ``processors`` (logits processors: grammars that come and go, rules
of single requests), ``replying`` (replies from results, and scores of given texts),
``endpoints`` (from a connection to an answer) and ``responses`` (an endpoint with field
names of its own), which ``api.py`` puts together.

``running.py`` is the server's end, ``renewing.py`` its new weights, ``processes.py``
several that share a model, ``display.py`` the progress of a file of prompts, which
`examples/batching` answers.
"""
