"""Attention over contiguous keys and values, for prompts that have no past."""
