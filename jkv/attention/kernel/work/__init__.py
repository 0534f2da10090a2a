"""The lists of what programs do."""
