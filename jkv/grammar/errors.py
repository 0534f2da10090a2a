"""Exceptions of grammar compilation, all of them ValueErrors."""


class TooLarge(ValueError):
    """Compilation or its tables exceed `max_bytes` or `timeout`."""


class Unsupported(ValueError):
    """A pattern, schema or rule uses an unsupported feature, named in the message."""


class Malformed(Unsupported):
    """The input is not a valid pattern, schema or rule."""


class NoText(ValueError):
    """The language is empty, or the vocabulary can spell none of its strings."""
