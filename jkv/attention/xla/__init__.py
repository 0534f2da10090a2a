"""Attention in plain XLA: loops over gathered chunks of blocks."""
