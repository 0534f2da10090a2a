"""Server of `examples/serve_batch.py` and `examples/serve_http.py`.

In reading order: ``loading.py`` (a checkpoint and its engine), ``asking`` (parses
request bodies; ``mistakes.py`` has the errors), ``processors`` (logits processors:
grammars and per-request rules), ``replying`` (replies from results, and scores of given
sequences), ``endpoints`` (HTTP endpoints and connections), ``responses`` and
``messages`` (APIs with other field names), and ``api.py``, which combines them.

``running.py`` runs the server, ``renewing.py`` reloads weights, ``processes.py`` shards
the model over processes, and ``display.py`` shows the progress of a batch
(`examples/batching`).
"""
