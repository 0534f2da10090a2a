"""JSON's brackets, separators and white space."""

import dataclasses
import functools
from collections.abc import Sequence

from jkv.grammar.expressions import (
    Choice,
    Expression,
    Literal,
    Repeat,
    Separated,
    concat,
    optional,
)
from jkv.grammar.schema.strings import literal_string


@dataclasses.dataclass(frozen=True, eq=False)
class Punctuation:
    """JSON's structural characters, with configurable white space."""

    # Allowed around each structural character, but not outside the value.
    space: Expression

    @functools.cached_property
    def comma(self) -> Expression:
        """A comma with space around it."""
        return concat(self.space, b",", self.space)

    def separated(
        self,
        entries: Sequence[tuple[Expression, bool]],
        rest: Expression | None = None,
        least: int = 0,
        most: int | None = None,
    ) -> Expression:
        """Return separated entries, each with True if required, and trailing space."""
        return Separated(entries, self.comma, rest, self.space, least, most)

    def property(self, key: str | Expression, value: Expression) -> Expression:
        key = literal_string(key) if isinstance(key, str) else key
        return concat(key, self.space, b":", self.space, value)

    def array(self, inner: Expression) -> Expression:
        """Put brackets around contents, which end with space unless they are empty."""
        return concat(b"[", self.space, inner, b"]")

    def object(self, inner: Expression) -> Expression:
        """Put braces around contents, which end with space unless they are empty."""
        return concat(b"{", self.space, inner, b"}")

    def alike(self, item: Expression, least: int, most: int | None) -> Expression:
        """Return `least` to `most` repetitions of an item, and trailing space."""
        if most is not None and least > most:
            return Choice([])
        if most is None and least < 2:
            return self.separated([(item, True)] * least, item)
        if most == 0:
            return Literal(b"")
        others = None if most is None else most - 1
        more = Repeat(concat(self.comma, item), max(0, least - 1), others)
        some = concat(item, more, self.space)
        return some if least else optional(some)
