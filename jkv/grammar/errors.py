"""Why a grammar cannot be made, by name: exceptions that are all ValueErrors."""


class TooLarge(ValueError):
    """The tables of a grammar, or what compiling it takes, exceed `max_bytes`."""


class Unsupported(ValueError):
    """A pattern or a schema uses what is not served; the text names it."""


class Malformed(Unsupported):
    """It is no pattern or schema at all: nobody would serve it as it is written."""


class NoText(ValueError):
    """The language has no text, or none that the vocabulary can spell."""
