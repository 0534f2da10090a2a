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
      least: how many must be there, of which all of the rest are one.
      most: how many may be there, of which all of the rest count; None for any number.
    """

    entries: Sequence[tuple[Expression, bool]]
    separator: Expression
    rest: Expression | None = None
    ending: Expression = Literal(b"")
    least: int = 0
    most: int | None = None


def concat(*parts: Expression | bytes) -> Expression:
    """Return the expression of parts in order; bytes are literals."""
    return Concatenation([Literal(p) if isinstance(p, bytes) else p for p in parts])


def size(expression: Expression) -> int:
    """Return about how many states an expression takes."""
    return _size(expression, {})


def _size(expression: Expression, known: dict[int, int]) -> int:
    if id(expression) in known:
        return known[id(expression)]
    found = 1
    match expression:
        case Literal(text):
            found = len(text)
        case Leaf(automaton):
            found = len(automaton.transitions)
        case Repeat(part, least, most):
            found = _size(part, known) * max(1, least, most or 0)
        case Concatenation(parts) | Choice(parts):
            found = sum(_size(part, known) for part in parts)
        case Separated(entries=entries, rest=rest):
            one = sum(_size(entry, known) for entry, _ in entries)
            one += _size(rest, known) if rest else 0
            found = one * max(1, expression.least, expression.most or 0)
    known[id(expression)] = found
    return found


def optional(part: Expression) -> Expression:
    """Return the expression of a part or nothing."""
    return Repeat(part, 0, 1)
