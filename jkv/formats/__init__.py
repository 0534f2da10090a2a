"""Formats: encodings of rows of keys and values, behind one interface."""
