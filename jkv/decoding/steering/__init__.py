"""Rows of what steers texts, as the loops keep, use and take them back."""
