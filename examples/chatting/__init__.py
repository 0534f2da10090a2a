"""The parts of `examples/chat.py`: turns and branches, and the commands."""
