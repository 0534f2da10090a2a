"""Languages put together from others: trees whose leaves are automata."""

import dataclasses
from collections.abc import Sequence

from jkv.grammar.automaton import Automaton


class Expression:
    """A language: one of the classes below."""


@dataclasses.dataclass(frozen=True, eq=False)
class Literal(Expression):
    """One text."""

    text: bytes


@dataclasses.dataclass(frozen=True, eq=False)
class ByteRange(Expression):
    """One byte of a range."""

    low: int
    high: int


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf(Expression):
    """The language of an automaton."""

    automaton: Automaton


@dataclasses.dataclass(frozen=True, eq=False)
class Concatenation(Expression):
    """A text of each part, one after the other."""

    parts: Sequence[Expression]


@dataclasses.dataclass(frozen=True, eq=False)
class Choice(Expression):
    """A text of any part; of no parts there is none."""

    parts: Sequence[Expression]


@dataclasses.dataclass(frozen=True, eq=False)
class Repeat(Expression):
    """Texts of a part, a number of them."""

    part: Expression
    least: int = 0  # how often at least
    most: int | None = None  # how often at most; None for any number


@dataclasses.dataclass(frozen=True, eq=False)
class Separated(Expression):
    """Entries in order with a separator between those that are there."""

    entries: Sequence[tuple[Expression, bool]]  # each with whether it must be there
    separator: Expression  # between two
    # What follows the entries, any number of times; None for nothing.
    rest: Expression | None = None
    # What stands behind the last one, if there is any.
    ending: Expression = Literal(b"")
    least: int = 0  # how many must be there, of which all of the rest are one
    # How many may be there, of which all of the rest count; None for any number.
    most: int | None = None


def concat(*parts: Expression | bytes) -> Expression:
    """Return the expression of parts in order; bytes are literals."""
    return Concatenation([Literal(p) if isinstance(p, bytes) else p for p in parts])


def size(expression: Expression, known: dict[int, int] | None = None) -> int:
    """Return about how many states an expression takes; some are known, by their id."""
    known = {} if known is None else known
    if id(expression) in known:
        return known[id(expression)]
    found = 1
    match expression:
        case Literal(text):
            found = len(text)
        case Leaf(automaton):
            found = len(automaton.transitions)
        case Repeat(part, least, most):
            found = size(part, known) * max(1, least, most or 0)
        case Concatenation(parts) | Choice(parts):
            found = sum(size(part, known) for part in parts)
        case Separated(entries=entries, rest=rest):
            one = sum(size(entry, known) for entry, _ in entries)
            one += size(rest, known) if rest else 0
            found = one * max(1, expression.least, expression.most or 0)
    known[id(expression)] = found
    return found


def optional(part: Expression) -> Expression:
    """Return the expression of a part or nothing."""
    return Repeat(part, 0, 1)
