"""Languages of byte strings: automata, and regular expressions with them as leaves.

A deterministic automaton is the intermediate form of a compiled grammar.
State 0 is the initial state; a transition of -1 rejects.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from jkv.grammar.bounds import Bounds

# Refinement stops after this many rounds with states unmerged: larger tables, still
# correct. A chain of counted characters needs one round per link.
MAX_ROUNDS = 256
BYTES_OF_PAIR = 4096  # bytes per pair of states, with its transition rows
_ROWS_AT_ONCE = 1024

Run = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """A language of byte strings."""

    # i32[S, 256], the state after each byte, -1 for none.
    transitions: npt.NDArray[np.int32]
    accepting: npt.NDArray[np.bool_]  # bool[S], True if a string may end in the state

    @functools.cached_property
    def runs(self) -> list[list[Run]]:
        """Transitions of each state as (first byte, last byte, target)."""
        found = []
        for row in self.transitions:
            borders = np.flatnonzero(np.diff(row)) + 1
            firsts, lasts = [0, *borders.tolist()], [*(borders - 1).tolist(), 255]
            runs = zip(firsts, lasts, row[firsts].tolist(), strict=True)
            found.append([run for run in runs if run[2] >= 0])
        return found

    def matches(self, text: bytes) -> bool:
        """Return True if the language contains the string."""
        state = 0
        for byte in text:
            state = int(self.transitions[state, byte])
            if state < 0:
                return False
        return bool(self.accepting[state])

    def is_empty(self) -> bool:
        """Return True if the language is empty; the automaton must be minimal."""
        return not self.accepting.any()


def minimize(automaton: Automaton, bounds: Bounds) -> Automaton:
    """Return the minimal automaton of the language; one rejecting state if it is empty.

    Drop states that are unreachable or cannot reach an accepting state, and merge
    states that accept the same continuations.
    """
    table, accepting = automaton.transitions, automaton.accepting
    # Free each table early: `max_bytes` allows two at one time.
    del automaton
    alive = find_reached(table) & find_finishing(table, accepting)
    alive[0] = True
    if not alive.all():
        table, accepting = keep_states(table, accepting, alive)
    # Equal columns are found by hash; merging needs one of each.
    hashes = _hash_columns(table)
    _, firsts, which = np.unique(hashes, return_index=True, return_inverse=True)
    columns, which = table[:, firsts], which.reshape(-1)
    del table
    labels = merge_states(columns, accepting.astype(np.int64), bounds)
    firsts = np.unique(labels, return_index=True)[1]
    renamed = np.append(labels, -1)[columns[firsts]].astype(np.int32)
    return Automaton(renamed[:, which], accepting[firsts])


def keep_states(
    table: npt.NDArray[np.int32],
    accepting: npt.NDArray[np.bool_],
    alive: npt.NDArray[np.bool_],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return the transitions and acceptance flags of the states in `alive`."""
    number = np.full(len(alive) + 1, -1, np.int32)
    number[:-1][alive] = np.arange(alive.sum())
    kept = table[alive]
    # In place, to save a table; index -1 wraps to the last entry, which is -1.
    np.take(number, kept, out=kept, mode="wrap")
    return kept, accepting[alive]


def _hash_columns(table: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """Return a hash of each column, u64[C], computed in chunks of rows."""
    weights = _odd(np.random.default_rng(1), len(table))
    hashes = np.zeros(table.shape[1], np.uint64)
    for first in range(0, len(table), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        hashes += weights[rows] @ table[rows].astype(np.uint64)
    return hashes ^ (hashes >> np.uint64(29))


def begin_at(automaton: Automaton, state: int) -> Automaton:
    """Return the suffixes accepted from `state`, by swapping it with state 0."""
    names = np.arange(len(automaton.transitions) + 1, dtype=np.int32)
    names[[0, state, -1]] = state, 0, -1
    order = names[:-1]
    return Automaton(names[automaton.transitions][order], automaton.accepting[order])


def merge_states(
    table: npt.NDArray[np.int32], labels: npt.NDArray[np.int64], bounds: Bounds
) -> npt.NDArray[np.int64]:
    """Return the equivalence class of each state, i64[S].

    Moore's refinement (E. F. Moore, Gedanken-experiments on sequential machines, 1956)
    with rows compared by a 64-bit hash: states stay equivalent while their labels,
    i64[S], agree and their transitions, i32[S, C], lead to equivalent states. State 0
    is in class 0. Each state is a class of its own if `MAX_ROUNDS` rounds do not
    converge.
    """
    rng = np.random.default_rng(0)
    weights = _odd(rng, table.shape[1])
    number = _number_by_first(labels)
    for _ in range(MAX_ROUNDS):
        bounds.spend(1, entries=table.size)
        names = _odd(rng, int(number.max()) + 2)
        rows = names[np.append(number, -1)[table]] * weights
        hashes = rows.sum(axis=1, dtype=np.uint64)
        hashes ^= hashes >> np.uint64(29)
        refined = _number_by_first(hashes * np.uint64(3) + names[number])
        if refined.max() == number.max():
            return number
        number = refined
    return np.arange(len(table))


def intersect(one: Automaton, other: Automaton, bounds: Bounds) -> Automaton:
    """Return the intersection of two languages."""
    pairs, transitions = _pair(one.transitions, other.transitions, bounds)
    accepting = one.accepting[pairs[0]] & other.accepting[pairs[1]]
    return minimize(Automaton(transitions, accepting), bounds)


def subtract(one: Automaton, other: Automaton, bounds: Bounds) -> Automaton:
    """Return the strings of `one` that are not in `other`."""
    # Complete `other` with a rejecting sink, so that pairs exist after it rejects.
    nowhere = len(other.transitions)
    table = np.where(other.transitions < 0, np.int32(nowhere), other.transitions)
    table = np.concatenate([table, np.full((1, 256), nowhere, np.int32)])
    pairs, transitions = _pair(one.transitions, table, bounds)
    accepting = one.accepting[pairs[0]] & ~np.append(other.accepting, False)[pairs[1]]
    return minimize(Automaton(transitions, accepting), bounds)


def _pair(
    one: npt.NDArray[np.int32], other: npt.NDArray[np.int32], bounds: Bounds
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the reachable pairs of states, i64[2, P], and their transitions."""
    width = len(other)
    known = np.zeros(1, np.int64)  # pair numbers, in order of discovery
    newest, rows = known, []
    while len(newest):
        left, right = one[newest // width], other[newest % width]
        is_alive = (left >= 0) & (right >= 0)
        reached = np.where(is_alive, left.astype(np.int64) * width + right, -1)
        rows.append(reached)
        distinct = np.unique(reached[is_alive])
        newest = np.setdiff1d(distinct, known, assume_unique=True)
        known = np.concatenate([known, newest])
        bounds.hold(len(known) * BYTES_OF_PAIR, "two languages at once")
        bounds.spend(1, entries=reached.size)
    order = np.argsort(known)
    wanted = np.concatenate(rows)
    places = order[np.searchsorted(known[order], wanted).clip(max=len(known) - 1)]
    transitions = np.where(wanted < 0, -1, places).astype(np.int32)
    return np.stack([known // width, known % width]), transitions


def find_reached(table: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return the states reachable from state 0, bool[S]."""
    start = np.zeros(len(table), bool)
    start[0] = True

    def look(states: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        found = table[states].reshape(-1)
        return found[found >= 0].astype(np.int64)

    return _flood(start, look)


def find_finishing(
    table: npt.NDArray[np.int32], accepting: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return the states from which an accepting state is reachable, bool[S]."""
    sources, columns = np.nonzero(table >= 0)
    targets = table[sources, columns]
    count = np.int64(len(table))
    pairs = np.stack(np.divmod(np.unique(targets * count + sources), count))
    counts = np.bincount(pairs[0], minlength=len(table))
    ends = np.cumsum(counts)

    def look(states: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        wanted = counts[states]
        lanes = np.arange(wanted.sum()) - np.repeat(np.cumsum(wanted) - wanted, wanted)
        return pairs[1][np.repeat(ends[states] - wanted, wanted) + lanes]

    return _flood(accepting.copy(), look)


def _flood(
    found: npt.NDArray[np.bool_],
    look: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]],
) -> npt.NDArray[np.bool_]:
    newest = np.flatnonzero(found)
    while len(newest):
        near = np.unique(look(newest))
        newest = near[~found[near]]
        found[newest] = True
    return found


def _odd(rng: np.random.Generator, num: int) -> npt.NDArray[np.uint64]:
    return rng.integers(0, 2**63, num, np.uint64) * np.uint64(2) + np.uint64(1)


def _number_by_first(values: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """Number equal values alike, in order of first appearance."""
    _, firsts, which = np.unique(values, return_index=True, return_inverse=True)
    ranks = np.empty(len(firsts), np.int64)
    ranks[np.argsort(firsts)] = np.arange(len(firsts))
    return ranks[which.reshape(-1)]


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
