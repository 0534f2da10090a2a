"""The public verbs, one or a pair per file."""
