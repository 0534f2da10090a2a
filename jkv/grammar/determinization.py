"""Convert an expression to a deterministic automaton.

An expression becomes a nondeterministic automaton (K. Thompson, Regular expression
search algorithm, 1968) with byte ranges on its edges, which the subset construction
makes deterministic (M. Rabin and D. Scott, Finite automata and their decision problems,
1959).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jkv.grammar.automaton import (
    Automaton,
    ByteRange,
    Choice,
    Concatenation,
    Expression,
    Leaf,
    Literal,
    Repeat,
    Run,
    Separated,
    minimize,
)
from jkv.grammar.bounds import Bounds

# Host memory per node, per state with its transition row, and per node in a state's
# subset; measured.
_BYTES_OF_NODE, _BYTES_OF_STATE, _BYTES_OF_MEMBER = 400, 2048, 40
Row = np.ndarray[tuple[int], np.dtype[np.int32]]
_WHAT = "putting a language together"


def determinize(expression: Expression, bounds: Bounds) -> Automaton:
    """Return the minimal automaton of an expression."""
    return minimize(_follow(expression, bounds), bounds)


def _follow(expression: Expression, bounds: Bounds) -> Automaton:
    """Return an automaton of an expression, and free its layout."""
    layout = _Layout(bounds)
    begin, end = layout.lay_out(expression)
    return layout.follow(begin, end)


def subtract_expression(one: Automaton, other: Expression, bounds: Bounds) -> Automaton:
    """Return the strings of an automaton that are not in an expression's language.

    The expression is determinized along the automaton's strings only; its full
    automaton may be many times larger.
    """
    layout = _Layout(bounds)
    begin, end = layout.lay_out(other)
    sets = _Sets(layout, [begin])
    numbers, pairs, rows = {(0, 0): 0}, [(0, 0)], []
    for state, nodes in pairs:
        reached = one.transitions[state]
        which = sets.row(nodes) if nodes >= 0 else np.full(256, -1, np.int32)
        row = np.full(256, -1, np.int32)
        for pair in {*zip(reached.tolist(), which.tolist(), strict=True)}:
            if pair[0] >= 0:
                if pair not in numbers:
                    numbers[pair] = len(pairs)
                    pairs.append(pair)
                    bounds.hold(len(pairs) * _BYTES_OF_STATE, _WHAT)
                row[(reached == pair[0]) & (which == pair[1])] = numbers[pair]
        rows.append(row)
    accepting = [
        one.accepting[s] and not (n >= 0 and end in sets.nodes[n]) for s, n in pairs
    ]
    return minimize(Automaton(np.stack(rows), np.array(accepting)), bounds)


def substitute(
    automaton: Automaton, texts: Mapping[int, Expression], bounds: Bounds
) -> Automaton:
    """Return the strings of an automaton with some bytes replaced by languages."""
    layout = _Layout(bounds)
    begin, end = layout.lay_out(Leaf(automaton))
    for node, edges in enumerate([*layout.edges]):
        layout.edges[node] = []
        for low, high, target in edges:
            replaced = [byte for byte in texts if low <= byte <= high]
            for byte in replaced:
                layout.jumps[layout.add(texts[byte], node)].append(target)
            firsts = [low, *(byte + 1 for byte in replaced)]
            lasts = [*(byte - 1 for byte in replaced), high]
            kept = zip(firsts, lasts, strict=True)
            layout.edges[node] += [(*run, target) for run in kept if run[0] <= run[1]]
    return minimize(layout.follow(begin, end), bounds)


class _Layout:
    """A nondeterministic automaton: nodes, byte-range edges and empty edges."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.edges: list[list[Run]] = []
        self.jumps: list[list[int]] = []

    def add_node(self) -> int:
        self.edges.append([])
        self.jumps.append([])
        self.bounds.hold(len(self.edges) * _BYTES_OF_NODE, _WHAT)
        return len(self.edges) - 1

    def lay_out(self, expression: Expression) -> tuple[int, int]:
        """Add a language and return its first and last node."""
        begin = self.add_node()
        # A node of its own without outgoing edges, unlike the end of a repetition.
        return begin, self._behind(self.add(expression, begin))

    def add(self, expression: Expression, begin: int) -> int:
        """Add an expression after node `begin`; return its last node."""
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
            before, begin = begin, self.add(part, begin)
            if begin == before:
                return begin  # matches only the empty string
        if most is None:
            # A node of its own, so that the loop does not reach preceding nodes.
            begin = self._behind(begin)
            end = self.add(part, self._behind(begin))
            self.jumps[end].append(begin)
            return begin
        ends = [begin]
        for _ in range(most - least):
            ends.append(self.add(part, ends[-1]))
            if ends[-1] == ends[-2]:
                return begin
        return self._meet(ends)

    def _separate(self, all_: Separated, begin: int) -> int:
        # Last node by number of entries, capped at the bounds that matter.
        reached = {0: self._behind(begin)}
        for entry, is_required in all_.entries:
            ends = self._add_entry(all_, entry, reached)
            if is_required:
                reached = ends
                continue
            counts = reached.keys() | ends.keys()
            both = {c: [at[c] for at in (reached, ends) if c in at] for c in counts}
            reached = {c: self._meet(nodes) for c, nodes in both.items()}
        finals = list(reached.items())
        if all_.rest is not None:
            finals += self._add_rest(all_, all_.rest, reached).items()
        some = [node for count, node in finals if count >= max(1, all_.least)]
        none = [node for count, node in finals if count == 0 >= all_.least]
        return self._meet([*none, self.add(all_.ending, self._meet(some))])

    def _add_entry(
        self, all_: Separated, entry: Expression, reached: dict[int, int]
    ) -> dict[int, int]:
        """Add an entry after each count in `reached`; return the new last nodes."""
        starts: dict[int, int] = {}
        for count, node in reached.items():
            most = max(1, all_.least) if all_.most is None else all_.most
            target = count + 1 if all_.most is not None else min(count + 1, most)
            if target <= most:
                before = self._behind(node)
                before = self.add(all_.separator, before) if count else before
                self.jumps[before].append(starts.setdefault(target, self.add_node()))
        return {
            count: self._meet([self.add(entry, start)])
            for count, start in starts.items()
        }

    def _add_rest(
        self, all_: Separated, rest: Expression, reached: dict[int, int]
    ) -> dict[int, int]:
        """Add repetitions of `rest` after each count; return the new last nodes."""
        if all_.most is not None:
            found: dict[int, list[int]] = {}
            while reached:
                reached = self._add_entry(all_, rest, reached)
                for count, node in reached.items():
                    found.setdefault(count, []).append(node)
            return {count: self._meet(nodes) for count, nodes in found.items()}
        ends: dict[int, int] = {}
        for count, node in self._add_entry(all_, Literal(b""), reached).items():
            start, end = self._behind(node), self.add_node()
            self.jumps[self.add(rest, start)].append(end)
            self.jumps[self.add(all_.separator, self._behind(end))].append(start)
            ends[count] = end
        return ends

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
        """Return the deterministic automaton by subset construction."""
        sets, table = _Sets(self, [begin]), np.empty((16, 256), np.int32)
        for number, _ in enumerate(sets.nodes):
            if number == len(table):
                # Grown in place if possible: two copies may exceed the memory limit.
                table.resize((number + number // 4, 256), refcheck=False)
            table[number] = sets.row(number)
        table.resize((len(sets.nodes), 256), refcheck=False)
        accepting = np.array([end in nodes for nodes in sets.nodes])
        return Automaton(table, accepting)

    def close(self, nodes: Sequence[int]) -> frozenset[int]:
        """Return the empty-edge closure, without nodes that have only empty edges."""
        found, newest = set(nodes), list(nodes)
        while newest:
            for node in self.jumps[newest.pop()]:
                if node not in found:
                    found.add(node)
                    newest.append(node)
        self.bounds.spend(len(found))
        return frozenset(n for n in found if self.edges[n] or not self.jumps[n])


class _Sets:
    """Subsets of a layout's nodes, numbered in order of discovery.

    Attributes:
      nodes: the subset of each number.
    """

    def __init__(self, layout: _Layout, begin: Sequence[int]) -> None:
        first = layout.close(begin)
        self._layout, self.nodes = layout, [first]
        self._numbers, self._num_bytes = {first: 0}, 0
        self._closures: dict[tuple[int, ...], int] = {}

    def row(self, number: int) -> Row:
        """Return the subset after each byte, i32[256]; -1 for none."""
        bounds, edges_of = self._layout.bounds, self._layout.edges
        row = np.full(256, -1, np.int32)
        edges = [edge for node in self.nodes[number] for edge in edges_of[node]]
        bounds.spend(len(self.nodes[number]) + len(edges))
        for low, high, targets in _split(edges):
            if targets not in self._closures:
                self._closures[targets] = self._number(targets)
            row[low : high + 1] = self._closures[targets]
        return row

    def _number(self, targets: tuple[int, ...]) -> int:
        reached = self._layout.close(targets)
        if reached not in self._numbers:
            self._numbers[reached] = len(self.nodes)
            self.nodes.append(reached)
            self._num_bytes += _BYTES_OF_STATE + _BYTES_OF_MEMBER * len(reached)
            nodes = len(self._layout.edges) * _BYTES_OF_NODE
            self._layout.bounds.hold(nodes + self._num_bytes, _WHAT)
        return self._numbers[reached]


def _split(edges: Sequence[Run]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Split overlapping byte ranges into disjoint ones with all their targets."""
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
