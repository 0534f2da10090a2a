"""Monte Carlo tree search over sequences (`tree_search.py`)."""
