"""Models with a recurrent state, their loops, and the table of verbs on them."""
