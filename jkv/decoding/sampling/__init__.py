"""Sampling: options, filters, draws, and the end of completions."""
