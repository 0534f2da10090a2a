"""Implementation of `examples/chat.py`: turns, branches and commands."""
