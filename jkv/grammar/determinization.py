"""The one automaton that is made of an expression.

It is laid out as an automaton with several transitions to a byte (K. Thompson, Regular
expression search algorithm, 1968), all of which are followed at once (M. Rabin and
D. Scott, Finite automata and their decision problems, 1959), ranges instead of bytes.
"""

from collections.abc import Sequence

import numpy as np

from jkv.grammar.automaton import Automaton, Run, minimize
from jkv.grammar.errors import TooLarge
from jkv.grammar.expressions import (
    ByteRange,
    Choice,
    Concatenation,
    Expression,
    Leaf,
    Literal,
    Repeat,
    Separated,
)

# Bytes that a node takes on the host while it is laid out, measured, and those of a
# state with its row of transitions.
_BYTES_OF_NODE, _BYTES_OF_STATE = 400, 2048


def determinize(expression: Expression, *, max_bytes: int) -> Automaton:
    """Return the minimal automaton of an expression.

    Raises:
      TooLarge: it takes more than `max_bytes` on the way.
    """
    layout = _Layout(max_bytes)
    begin, end = layout.lay_out(expression)
    return minimize(layout.follow(begin, end))


class _Layout:
    """Nodes with edges of byte ranges and edges that take no byte."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.edges: list[list[Run]] = []
        self.jumps: list[list[int]] = []

    def add_node(self) -> int:
        self.edges.append([])
        self.jumps.append([])
        self._check(len(self.edges) * _BYTES_OF_NODE)
        return len(self.edges) - 1

    def lay_out(self, expression: Expression) -> tuple[int, int]:
        """Lay out a whole language; return the nodes where it begins and ends."""
        begin = self.add_node()
        # Nothing leads on from the end, as from that of a repetition.
        return begin, self._behind(self.add(expression, begin))

    def add(self, expression: Expression, begin: int) -> int:
        """Lay out an expression behind a node; return the node where it ends."""
        match expression:
            case Literal(text):
                for byte in text:
                    node = self.add_node()
                    self.edges[begin].append((byte, byte, node))
                    begin = node
                return begin
            case ByteRange(low, high):
                node = self.add_node()
                self.edges[begin].append((low, high, node))
                return node
            case Leaf(automaton):
                return self._add_leaf(automaton, begin)
            case Concatenation(parts):
                for part in parts:
                    begin = self.add(part, begin)
                return begin
            case Choice(parts):
                ends = [self.add(part, self._behind(begin)) for part in parts]
                return self._meet(ends)
            case Repeat(part, least, most):
                return self._repeat(part, least, most, begin)
            case Separated():
                return self._separate(expression, begin)
        raise TypeError(f"no expression: {expression!r}")

    def _add_leaf(self, automaton: Automaton, begin: int) -> int:
        nodes = [self.add_node() for _ in automaton.runs]
        self.jumps[begin].append(nodes[0])
        for node, runs in zip(nodes, automaton.runs, strict=True):
            self.edges[node] = [(low, high, nodes[to]) for low, high, to in runs]
        return self._meet([nodes[i] for i in np.flatnonzero(automaton.accepting)])

    def _repeat(
        self, part: Expression, least: int, most: int | None, begin: int
    ) -> int:
        for _ in range(least):
            begin = self.add(part, begin)
        if most is None:
            # A node of its own: what stands before must not be reached by the loop.
            begin = self._behind(begin)
            end = self.add(part, self._behind(begin))
            self.jumps[end].append(begin)
            return begin
        ends = [begin]
        for _ in range(most - least):
            ends.append(self.add(part, ends[-1]))
        return self._meet(ends)

    def _separate(self, all_: Separated, begin: int) -> int:
        # Two ways run side by side: nothing was there yet (first), or something was.
        first, later = self._behind(begin), self.add_node()
        for entry, is_required in all_.entries:
            before = self._behind(first)
            self.jumps[self.add(all_.separator, self._behind(later))].append(before)
            after = self._meet([self.add(entry, before)])
            if is_required:
                first = self.add_node()  # not reached any more
            else:
                self.jumps[later].append(after)
                first = self._behind(first)
            later = after
        if all_.rest is not None:
            before = self._behind(first)
            later = self._behind(later)
            self.jumps[self.add(all_.separator, self._behind(later))].append(before)
            self.jumps[self.add(all_.rest, before)].append(later)
        return self._meet([first, self.add(all_.ending, self._behind(later))])

    def _behind(self, begin: int) -> int:
        node = self.add_node()
        self.jumps[begin].append(node)
        return node

    def _meet(self, ends: Sequence[int]) -> int:
        node = self.add_node()
        for end in ends:
            self.jumps[end].append(node)
        return node

    def follow(self, begin: int, end: int) -> Automaton:
        """Return the automaton whose states are the sets of nodes reached at once."""
        first = self._close([begin])
        number, sets = {first: 0}, [first]
        rows: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        closures: dict[tuple[int, ...], frozenset[int]] = {}
        for nodes in sets:
            row = np.full(256, -1, np.int32)
            for low, high, targets in _split([e for n in nodes for e in self.edges[n]]):
                if targets not in closures:
                    closures[targets] = self._close(targets)
                reached = closures[targets]
                if reached not in number:
                    number[reached] = len(sets)
                    sets.append(reached)
                    self._check(len(sets) * _BYTES_OF_STATE)
                row[low : high + 1] = number[reached]
            rows.append(row)
        accepting = np.array([end in nodes for nodes in sets])
        return Automaton(np.stack(rows), accepting)

    def _close(self, nodes: Sequence[int]) -> frozenset[int]:
        """Return the nodes reached without a byte; only those that lead on or end."""
        found, newest = set(nodes), list(nodes)
        while newest:
            for node in self.jumps[newest.pop()]:
                if node not in found:
                    found.add(node)
                    newest.append(node)
        return frozenset(n for n in found if self.edges[n] or not self.jumps[n])

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise TooLarge(
                f"putting a language together takes more than max_bytes, "
                f"{self.max_bytes:,}"
            )


def _split(edges: Sequence[Run]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Split overlapping ranges of bytes into distinct ones with all their targets."""
    if len(edges) == 1:
        low, high, target = edges[0]
        return [(low, high, (target,))]
    changes: dict[int, list[tuple[int, int]]] = {}
    for low, high, target in edges:
        changes.setdefault(low, []).append((1, target))
        changes.setdefault(high + 1, []).append((-1, target))
    found, open_, previous = [], dict[int, int](), 0
    for place in sorted(changes):
        targets = tuple(sorted(t for t, count in open_.items() if count))
        if targets:
            found.append((previous, place - 1, targets))
        for change, target in changes[place]:
            open_[target] = open_.get(target, 0) + change
        previous = place
    return found
