"""Deterministic automata over bytes: what a language is while a grammar is compiled.

State 0 begins; a transition of -1 leads nowhere.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jkv.grammar.bounds import Bounds

# Rounds of refinement after which states are left unmerged. Tables are right with
# states that could be merged, too; long chains of counted characters need as many
# rounds as the chain is long.
MAX_ROUNDS = 256

Run = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """A language of byte strings.

    Attributes:
      transitions: i32[S, 256], the state after each byte, -1 for none.
      accepting: bool[S], whether a text may end there.
    """

    transitions: npt.NDArray[np.int32]
    accepting: npt.NDArray[np.bool_]

    @functools.cached_property
    def runs(self) -> list[list[Run]]:
        """Transitions of each state as (first byte, last byte, target)."""
        return [_find_runs(row) for row in self.transitions]

    def matches(self, text: bytes) -> bool:
        """Return whether a text is in the language."""
        state = 0
        for byte in text:
            state = int(self.transitions[state, byte])
            if state < 0:
                return False
        return bool(self.accepting[state])


def _find_runs(row: npt.NDArray[np.int32]) -> list[Run]:
    borders = np.flatnonzero(np.diff(row)) + 1
    firsts = [0, *borders.tolist()]
    lasts = [*(borders - 1).tolist(), 255]
    targets = row[firsts].tolist()
    runs = zip(firsts, lasts, targets, strict=True)
    return [run for run in runs if run[2] >= 0]


def trim(automaton: Automaton) -> Automaton:
    """Drop states that are not reached, or from which no text can be finished.

    Returns:
      The same language; of none, one state that leads nowhere.
    """
    table, accepting = automaton.transitions, automaton.accepting
    alive = find_reached(table) & find_finishing(table, accepting)
    alive[0] = True
    number = np.full(len(alive) + 1, -1, np.int32)
    number[:-1][alive] = np.arange(alive.sum())
    return Automaton(number[table[alive]], accepting[alive])


def minimize(automaton: Automaton, bounds: Bounds) -> Automaton:
    """Trim an automaton and merge states that accept the same continuations."""
    trimmed = trim(automaton)
    firsts, which = _distinct_columns(trimmed.transitions)
    columns = trimmed.transitions[:, firsts]
    labels = merge_states(columns, trimmed.accepting.astype(np.int64), bounds)
    firsts = np.unique(labels, return_index=True)[1]
    renamed = np.append(labels, -1)[columns[firsts]].astype(np.int32)
    return Automaton(renamed[:, which], trimmed.accepting[firsts])


def _distinct_columns(
    table: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where distinct columns stand, and which of them each one is, by hashes."""
    weights = _odd(np.random.default_rng(1), len(table))
    hashes = weights @ table.astype(np.uint64)
    hashes ^= hashes >> np.uint64(29)
    _, firsts, which = np.unique(hashes, return_index=True, return_inverse=True)
    return firsts, which.reshape(-1)


def merge_states(
    table: npt.NDArray[np.int32], labels: npt.NDArray[np.int64], bounds: Bounds
) -> npt.NDArray[np.int64]:
    """Return a number for each state, equal for states that nothing tells apart.

    Moore's refinement (E. F. Moore, Gedanken-experiments on sequential machines, 1956)
    with rows compared by a hash of 64 bits: states stay together while their labels
    agree and their transitions lead to states that are together.

    Args:
      table: i32[S, C], -1 for none.
      labels: i64[S], what tells states apart from the beginning.
      bounds: of the compilation.

    Returns:
      i64[S], numbered in the order of the states, so that state 0's is 0. Each state
      has its own number if `MAX_ROUNDS` were not enough.
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


def find_reached(table: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return which states the first one leads to, bool[S]."""
    start = np.zeros(len(table), bool)
    start[0] = True
    return _spread(table, start)


def find_finishing(
    table: npt.NDArray[np.int32], accepting: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return from which states an accepting one can be reached, bool[S]."""
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


def _spread(
    table: npt.NDArray[np.int32], start: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    def look(states: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        found = table[states].reshape(-1)
        return found[found >= 0].astype(np.int64)

    return _flood(start, look)


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
    """Number equal values alike, in the order in which they first appear."""
    _, firsts, which = np.unique(values, return_index=True, return_inverse=True)
    ranks = np.empty(len(firsts), np.int64)
    ranks[np.argsort(firsts)] = np.arange(len(firsts))
    return ranks[which.reshape(-1)]
