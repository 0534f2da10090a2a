"""Arguments of the loops, as values or keyword arguments."""
