"""Regular expressions over bytes: trees with automata as leaves."""

import dataclasses
from collections.abc import Sequence

from jkv.grammar.automaton import Automaton


class Expression:
    """Base class of languages."""


@dataclasses.dataclass(frozen=True, eq=False)
class Literal(Expression):
    """One string."""

    text: bytes


@dataclasses.dataclass(frozen=True, eq=False)
class ByteRange(Expression):
    """One byte between `low` and `high`."""

    low: int
    high: int


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf(Expression):
    """The language of an automaton."""

    automaton: Automaton


@dataclasses.dataclass(frozen=True, eq=False)
class Concatenation(Expression):
    """Parts in order."""

    parts: Sequence[Expression]


@dataclasses.dataclass(frozen=True, eq=False)
class Choice(Expression):
    """Any of several parts; without parts, the empty language."""

    parts: Sequence[Expression]


@dataclasses.dataclass(frozen=True, eq=False)
class Repeat(Expression):
    """Repetitions of a part."""

    part: Expression
    least: int = 0  # least number of repetitions
    most: int | None = None  # greatest number of repetitions; None for no limit


@dataclasses.dataclass(frozen=True, eq=False)
class Separated(Expression):
    """Required and optional entries in order, with separators between them."""

    entries: Sequence[tuple[Expression, bool]]  # each with True if required
    separator: Expression  # between two entries
    # Repeated any number of times after the entries; None for nothing.
    rest: Expression | None = None
    # After the last entry, if there is any.
    ending: Expression = Literal(b"")
    least: int = 0  # least number of entries; all repetitions of `rest` count as one
    # Greatest number of entries, each repetition of `rest` counted; None for no
    # limit.
    most: int | None = None


def concat(*parts: Expression | bytes) -> Expression:
    """Return the concatenation of parts; bytes become literals."""
    return Concatenation([Literal(p) if isinstance(p, bytes) else p for p in parts])


def size(expression: Expression, known: dict[int, int] | None = None) -> int:
    """Estimate the number of states of an expression; `known` caches by id."""
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
    """Return the part or the empty string."""
    return Repeat(part, 0, 1)
