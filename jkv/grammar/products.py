"""Two automata side by side: the texts of both, or of one and not the other."""

import numpy as np
import numpy.typing as npt

from jkv.grammar.automaton import Automaton, minimize
from jkv.grammar.bounds import Bounds

BYTES_OF_PAIR = 4096  # of a pair of states: its rows of transitions


def intersect(one: Automaton, other: Automaton, bounds: Bounds) -> Automaton:
    """Return the texts that are in both languages."""
    pairs, transitions = _pair(one.transitions, other.transitions, bounds)
    accepting = one.accepting[pairs[0]] & other.accepting[pairs[1]]
    return minimize(Automaton(transitions, accepting), bounds)


def subtract(one: Automaton, other: Automaton, bounds: Bounds) -> Automaton:
    """Return the texts of a language that are not in another."""
    # What leads nowhere leads to a state that accepts nothing.
    nowhere = len(other.transitions)
    table = np.where(other.transitions < 0, np.int32(nowhere), other.transitions)
    table = np.concatenate([table, np.full((1, 256), nowhere, np.int32)])
    pairs, transitions = _pair(one.transitions, table, bounds)
    accepting = one.accepting[pairs[0]] & ~np.append(other.accepting, False)[pairs[1]]
    return minimize(Automaton(transitions, accepting), bounds)


def is_empty(automaton: Automaton) -> bool:
    """Return whether a trimmed automaton has no text."""
    return not automaton.accepting.any()


def _pair(
    one: npt.NDArray[np.int32], other: npt.NDArray[np.int32], bounds: Bounds
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the pairs of states that are reached, i64[2, P], and where they lead."""
    width = len(other)
    known = np.zeros(1, np.int64)  # numbers of pairs, in the order of their discovery
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
