"""Automata over tokens, with equivalent tokens merged into classes.

Tokens with equal transitions in every state form a class. They are found by hash: each
token sums a random 128-bit weight per pair of states that it connects, so that
different tokens collide with a probability of 2**-128.

The vocabulary is walked as a trie from many states at once, level by level. A branch
ends where no state has a transition: most tokens are dropped after their first byte.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from jkv.grammar.automaton import (
    Automaton,
    find_finishing,
    find_reached,
    keep_states,
    merge_states,
)
from jkv.grammar.bounds import Bounds
from jkv.grammar.errors import NoText
from jkv.grammar.vocabulary import Vocabulary

# (state, node) pairs walked at once, some 100 MB.
_PAIRS_AT_ONCE = 2**21
_BYTES_OF_PAIR = 128  # counted against max_bytes; a walk uses about a quarter

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenTable:
    """An automaton over token classes."""

    # i32[S, C], the state after a token of each class, -1 for none. All states are
    # reachable from state 0 and reach an accepting state.
    transitions: Ints
    accepting: npt.NDArray[np.bool_]  # bool[S], True if a string may end in the state
    class_of_token: Ints  # i32[V]


def make_table(
    automaton: Automaton, vocabulary: Vocabulary, bounds: Bounds
) -> TokenTable:
    """Walk a vocabulary over an automaton; raise `NoText` if it spells no string."""
    trie = trie_of(vocabulary)
    report = vocabulary.progress or (lambda _done, _all: None)
    class_of_token, firsts = _find_classes(automaton.transitions, trie, report, bounds)
    num_states = len(automaton.transitions)
    # Two such int32 tables exist at a time.
    what = f"a table of {num_states:,} states and {len(firsts):,} classes of tokens"
    held = automaton.transitions.nbytes
    bounds.hold(held + num_states * len(firsts) * 8, what)
    table = np.stack(
        [_follow(automaton.transitions, vocabulary, first) for first in firsts], axis=1
    )
    # Tokens may not reach, or not finish from, states that bytes do.
    alive = find_finishing(table, automaton.accepting)
    if not alive[0]:
        raise NoText("vocabulary cannot spell any string of this language")
    table = np.where(np.append(alive, False)[table], table, np.int32(-1))
    alive &= find_reached(table)
    table, accepting = keep_states(table, automaton.accepting, alive)
    labels = merge_states(table, accepting.astype(np.int64), bounds)
    merged = np.unique(labels, return_index=True)[1]
    table = np.append(labels, -1)[table[merged]].astype(np.int32)
    # Classes may have differed only in dropped states.
    table, which = np.unique(table, axis=1, return_inverse=True)
    classes = which.reshape(-1)[class_of_token]
    return TokenTable(table, accepting[merged], classes.astype(np.int32))


def _find_classes(
    transitions: Ints,
    trie: "TokenTrie",
    report: Callable[[int, int], None],
    bounds: Bounds,
) -> tuple[Ints, list[int]]:
    """Return the class of each token, i32[V], and a token of each; -1 for no token."""
    rng = np.random.default_rng(0)
    num_states, num_nodes = len(transitions), len(trie.last_bytes)
    shape = 2, num_states
    begin = rng.integers(0, 2**64 - 1, shape, np.uint64) | np.uint64(1)
    end = rng.integers(0, 2**64 - 1, shape, np.uint64)
    hashes = np.zeros((2, num_nodes), np.uint64)
    num_pairs = min(_PAIRS_AT_ONCE, bounds.max_bytes // _BYTES_OF_PAIR)
    at_once = max(1, num_pairs // max(1, num_nodes))
    for first in range(0, num_states, at_once):
        states = np.arange(first, min(first + at_once, num_states), dtype=np.int32)
        for origins, nodes, reached in trie.walk(transitions, states):
            bounds.spend(1, entries=nodes.size)
            for half in range(2):
                parts = begin[half, states[origins]] * end[half, reached]
                np.add.at(hashes[half], nodes, parts)
        report(first + len(states), num_states)
    of_token = hashes[:, trie.node_of_token]
    of_token[:, trie.node_of_token == 0] = 0
    order = np.lexsort(of_token)
    ordered = of_token[:, order]
    is_first = np.append(True, (np.diff(ordered) != 0).any(axis=0))
    class_of_token = np.empty(len(order), np.int32)
    class_of_token[order] = np.cumsum(is_first) - 1
    firsts = order[is_first]
    leads_nowhere = (of_token[:, firsts] == 0).all(axis=0)
    return class_of_token, np.where(leads_nowhere, -1, firsts).tolist()


def _follow(transitions: Ints, vocabulary: Vocabulary, token: int) -> Ints:
    """Return the state after a token from every state, i32[S]."""
    states = np.arange(len(transitions), dtype=np.int32)
    spelled = vocabulary.tokens[token] if token >= 0 else None
    if spelled is None:
        return np.full_like(states, -1)
    for byte in spelled:
        states = np.where(states >= 0, transitions[states, byte], np.int32(-1))
    return states


@dataclasses.dataclass(frozen=True, eq=False)
class TokenTrie:
    """Trie of token prefixes; node 0 is the root, siblings are adjacent."""

    last_bytes: npt.NDArray[np.uint8]  # u8[N], last byte of each prefix
    first_children: Ints  # i32[N], first child of each node
    num_children: Ints  # i32[N]
    node_of_token: Ints  # i32[V], node of each token; 0 for empty tokens

    def walk(self, transitions: Ints, states: Ints) -> Iterator[tuple[Ints, ...]]:
        """Walk from states, i32[K], down to the leaves.

        Yields per level the live triples (index of the initial state, node, state
        there), by transitions i32[S, 256].
        """
        origins = np.arange(len(states), dtype=np.int32)
        nodes = np.zeros_like(origins)
        while len(nodes):
            counts = self.num_children[nodes]
            begins = np.cumsum(counts) - counts
            parents = np.repeat(np.arange(len(nodes), dtype=np.int32), counts)
            lanes = np.arange(len(parents), dtype=np.int32) - begins[parents]
            below = (self.first_children[nodes[parents]] + lanes).astype(np.int32)
            reached = transitions[states[parents], self.last_bytes[below]]
            lives = reached >= 0
            origins, nodes = origins[parents[lives]], below[lives]
            states = reached[lives]
            yield origins, nodes, states


_TRIES: "weakref.WeakKeyDictionary[Vocabulary, TokenTrie]" = weakref.WeakKeyDictionary()


def trie_of(vocabulary: Vocabulary) -> TokenTrie:
    """Return the trie of a vocabulary, cached."""
    if vocabulary not in _TRIES:
        ends = set(vocabulary.end_tokens)
        tokens = [
            b"" if token is None or number in ends else bytes(token)
            for number, token in enumerate(vocabulary.tokens)
        ]
        _TRIES[vocabulary] = make_trie(tokens)
    return _TRIES[vocabulary]


def make_trie(tokens: list[bytes]) -> TokenTrie:
    """Build the trie of `tokens`; an empty token stays at the root."""
    text = np.frombuffer(b"".join(tokens), np.uint8)
    lengths = np.array([len(token) for token in tokens], np.int64)
    starts = np.cumsum(lengths) - lengths
    node = np.zeros(len(tokens), np.int64)
    last_bytes, parents = [np.zeros(1, np.uint8)], [np.zeros(1, np.int64)]
    num_nodes = 1
    for depth in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > depth)
        keys = node[longer] * 256 + text[starts[longer] + depth]
        distinct, which = np.unique(keys, return_inverse=True)
        node[longer] = num_nodes + which
        last_bytes.append((distinct % 256).astype(np.uint8))
        parents.append(distinct // 256)
        num_nodes += len(distinct)
    # Nodes are numbered level by level, and by parent within a level.
    parent = np.concatenate(parents)[1:]
    num_children = np.bincount(parent, minlength=num_nodes)
    return TokenTrie(
        last_bytes=np.concatenate(last_bytes),
        first_children=(1 + np.cumsum(num_children) - num_children).astype(np.int32),
        num_children=num_children.astype(np.int32),
        node_of_token=node.astype(np.int32),
    )
