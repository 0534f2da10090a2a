"""Tree search over texts: parts of `tree_search.py`."""
