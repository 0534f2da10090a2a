"""Texts of a generation: prompts, what has come of them, the blocks they take."""
