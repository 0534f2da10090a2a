"""Regular expressions and schemas, in plain Python and at random."""
