"""Parts of `examples/serve_batch.py`.

``command.py`` answers the lines of a file, ``lines.py`` keeps the results.
"""
