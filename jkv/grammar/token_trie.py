"""The tokens of a vocabulary as a tree of bytes, and its walk over an automaton.

A walk goes down the tree from many states at once, level by level, and leaves a branch
where no state goes on: most tokens are given up after their first byte.
"""

import dataclasses
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from jkv.grammar.vocabulary import Vocabulary

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenTrie:
    """Beginnings of tokens, node 0 the empty one; children of a node stand together.

    Attributes:
      last_bytes: u8[N], the byte that leads to each node.
      first_children: i32[N], of each node.
      num_children: i32[N].
      node_of_token: i32[V], where each token ends; 0 for those that spell nothing.
    """

    last_bytes: npt.NDArray[np.uint8]
    first_children: Ints
    num_children: Ints
    node_of_token: Ints

    def walk(self, transitions: Ints, states: Ints) -> Iterator[tuple[Ints, ...]]:
        """Walk from some states down to the leaves.

        Args:
          transitions: i32[S, 256], -1 for none.
          states: i32[K], where to begin.

        Yields:
          For each level the triples (which of `states`, node, state there) that live.
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
    """Return the tree of a vocabulary; it is made once."""
    if vocabulary not in _TRIES:
        ends = set(vocabulary.end_tokens)
        tokens = [
            b"" if token is None or number in ends else bytes(token)
            for number, token in enumerate(vocabulary.tokens)
        ]
        _TRIES[vocabulary] = make_trie(tokens)
    return _TRIES[vocabulary]


def make_trie(tokens: list[bytes]) -> TokenTrie:
    """Make the tree of some tokens; an empty one spells nothing."""
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
    # Nodes are numbered level by level, those of a level by their parents.
    parent = np.concatenate(parents)[1:]
    num_children = np.bincount(parent, minlength=num_nodes)
    return TokenTrie(
        last_bytes=np.concatenate(last_bytes),
        first_children=(1 + np.cumsum(num_children) - num_children).astype(np.int32),
        num_children=num_children.astype(np.int32),
        node_of_token=node.astype(np.int32),
    )
