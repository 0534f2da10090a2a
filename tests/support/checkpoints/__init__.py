"""Tiny checkpoints and their configurations; programs that write `tests/fixtures`."""
