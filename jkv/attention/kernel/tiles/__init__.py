"""Tile sizes and compilation variants for each GPU."""
