"""Logits processor state in the loops, a row for each sequence."""
