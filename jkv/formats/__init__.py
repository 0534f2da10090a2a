"""How rows of keys and values are stored: each format is a value of one face."""
