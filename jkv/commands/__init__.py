"""What the commands do; their faces for `python -m` stand in the root."""
