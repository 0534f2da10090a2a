"""Implementation of the commands; their `python -m` modules are in the root package."""
