"""Languages put together from others: trees whose leaves are automata."""

import dataclasses
from collections.abc import Sequence

from jkv.grammar.automaton import Automaton


class Expression:
    """A language: one of the classes below."""


@dataclasses.dataclass(frozen=True, eq=False)
class Literal(Expression):
    """One text.

    Attributes:
      text: its bytes.
    """

    text: bytes


@dataclasses.dataclass(frozen=True, eq=False)
class ByteRange(Expression):
    """One byte of a range.

    Attributes:
      low: the first.
      high: the last.
    """

    low: int
    high: int


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf(Expression):
    """The language of an automaton.

    Attributes:
      automaton: it.
    """

    automaton: Automaton


@dataclasses.dataclass(frozen=True, eq=False)
class Concatenation(Expression):
    """A text of each part, one after the other.

    Attributes:
      parts: in order.
    """

    parts: Sequence[Expression]


@dataclasses.dataclass(frozen=True, eq=False)
class Choice(Expression):
    """A text of any part; of no parts there is none.

    Attributes:
      parts: to choose from.
    """

    parts: Sequence[Expression]


@dataclasses.dataclass(frozen=True, eq=False)
class Repeat(Expression):
    """Texts of a part, a number of them.

    Attributes:
      part: what is repeated.
      least: how often at least.
      most: how often at most; None for any number.
    """

    part: Expression
    least: int = 0
    most: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Separated(Expression):
    """Entries in order with a separator between those that are there.

    Attributes:
      entries: each with whether it must be there.
      separator: between two.
      rest: what follows the entries, any number of times; None for nothing.
      ending: what stands behind the last one, if there is any.
    """

    entries: Sequence[tuple[Expression, bool]]
    separator: Expression
    rest: Expression | None = None
    ending: Expression = Literal(b"")


def concat(*parts: Expression | bytes) -> Expression:
    """Return the expression of parts in order; bytes are literals."""
    return Concatenation([Literal(p) if isinstance(p, bytes) else p for p in parts])


def optional(part: Expression) -> Expression:
    """Return the expression of a part or nothing."""
    return Repeat(part, 0, 1)
