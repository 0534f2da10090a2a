"""Prompts, results and trajectory trees of a generation, and the blocks they need."""
