"""The optional prefix index, which maps prompt prefixes to full blocks."""
