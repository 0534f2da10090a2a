"""Tree search over texts: what `tree_search.py` is made of."""
