"""How calls are cut on each card."""
