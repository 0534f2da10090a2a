"""The model protocol, its steps and their sizes."""
