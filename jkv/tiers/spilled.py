"""Cached blocks on the host, apart from any cache, with the texts that they end."""

import dataclasses

import jax
import numpy as np

from jkv.blocks.contents import HostArray
from jkv.states.swapped import SwappedStates
from jkv.tiers.layout import Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SpilledGroup:
    """What P blocks of one group of layers hold."""

    nodes: np.ndarray  # i32[P], of the texts: the column that each block holds
    # By field name of `BlockStorage`, as in `Contents`: of the P blocks.
    storage: dict[str, tuple[HostArray, ...]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SpilledSnapshots:
    """P snapshots of states."""

    nodes: np.ndarray  # i32[P], the last column of the text of each
    num_pending: np.ndarray  # i32[P], of the text's last tokens those pending
    states: tuple[SwappedStates, ...]  # of each group with a state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Spilled:
    """Cached blocks on the host, as `spill` takes them out and `restore` takes them.

    Texts are a tree of Q *nodes*, columns of T tokens each, parents before children: a
    text is known by all of its tokens, and what texts have in common stands once. Nodes
    without a block only lead up to others.
    """

    tokens: np.ndarray  # i32[Q, T], of each node
    parents: np.ndarray  # i32[Q], the node before each, -1 for a text's first
    salts: np.ndarray  # i32[Q], the domain of each
    classes: np.ndarray | None  # i32[Q], of each (`free(keep=)`); None: there is one
    kept_until: np.ndarray | None  # u32[Q], the time up to which each has its class
    groups: tuple[SpilledGroup, ...]  # of each group with blocks
    snapshots: SpilledSnapshots | None  # where there are groups with a state
    # Of the cache that it left; static, as it is no array.
    layout: Layout = dataclasses.field(metadata={"static": True})

    @property
    def block_size(self) -> int:
        """Tokens of a column, T."""
        return self.tokens.shape[1]

    @property
    def num_blocks(self) -> int:
        """Blocks held, in all groups together."""
        return sum(len(group.nodes) for group in self.groups)

    @property
    def num_snapshots(self) -> int:
        """Snapshots held."""
        return 0 if self.snapshots is None else len(self.snapshots.nodes)

    @property
    def columns(self) -> np.ndarray:
        """The number of each node in its text, i32[Q]."""
        columns = np.zeros(len(self.parents), np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                columns[node] = columns[parent] + 1
        return columns

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def __repr__(self) -> str:
        """Fit one line."""
        return (
            f"Spilled({self.num_blocks} blocks, {self.num_snapshots} snapshots, of "
            f"{len(self.parents)} columns, {self.nbytes:,} bytes)"
        )


class TextBuilder:
    """The nodes of texts while they are gathered: each column of a text once."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._known: dict[tuple[int, int, bytes], int] = {}
        self.tokens: list[np.ndarray] = []
        self.parents: list[int] = []
        self.salts: list[int] = []

    def add(self, parent: int, salt: int, tokens: np.ndarray) -> int:
        """Return the node of a column, i32[T], behind another; -1 for none."""
        key = parent, salt, tokens.tobytes()
        node = self._known.setdefault(key, len(self.parents))
        if node == len(self.parents):
            self.tokens.append(tokens)
            self.parents.append(parent)
            self.salts.append(salt)
        return node

    def add_text(self, salt: int, tokens: np.ndarray) -> int:
        """Return the last node of a text, i32[n T]; -1 if it is empty."""
        node = -1
        for column in tokens.reshape(-1, self._size):
            node = self.add(node, salt, column)
        return node

    def find_text(self, salt: int, tokens: np.ndarray) -> int:
        """Return the last node of a text, i32[n T]; -1 if it is not there."""
        node = -1
        for column in tokens.reshape(-1, self._size):
            key = node, salt, column.tobytes()
            if key not in self._known:
                return -1
            node = self._known[key]
        return node

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the fields of `Spilled` that say which texts there are."""
        tokens = np.array(self.tokens, np.int32).reshape(-1, self._size)
        numbers = {"parents": self.parents, "salts": self.salts}
        return {"tokens": tokens} | {
            name: np.array(values, np.int32) for name, values in numbers.items()
        }
