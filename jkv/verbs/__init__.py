"""The public verbs, one or a pair to a file."""
