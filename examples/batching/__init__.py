"""What `examples/serve_batch.py` does.

``command.py`` answers the lines of a file, ``lines.py`` keeps the results.
"""
