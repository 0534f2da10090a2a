"""Spilled blocks in host memory, independent of a cache, with their token prefixes."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jkv.state import Cache

STATIC = {"static": True}  # for fields used on the host only


class Layout(NamedTuple):
    """Shapes and dtypes of a cache's blocks and states."""

    block_size: int
    num_groups: int  # groups with blocks
    num_states: int  # groups with a recurrent state
    # Per array: path as in `Held`, dtype, number of layers, and shape of a block or
    # state; for blocks also the dtypes of keys and values.
    arrays: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, cache: Cache) -> Self:
        kinds: list[tuple[Any, ...]] = []
        for number, storage in enumerate(cache.block_storage):
            meant = str(storage.dtype), str(storage.value_dtype)
            kinds += (
                (f"block.{number}.{name}", str(pool.dtype), pool.shape[0])
                + (storage.num_kv_heads, *pool.shape[3:], *meant)
                for name, pool in storage.arrays.items()
            )
        kinds += (
            (path, str(array.dtype), array.shape[0], *array.shape[2:])
            for path, array in list_snapshots(cache).items()
        )
        num_states = len(cache.metadata.state_numbers)
        num_groups = len(cache.block_storage)
        return cls(cache.block_size, num_groups, num_states, tuple(sorted(kinds)))

    @classmethod
    def of_json(cls, found: Any) -> Self:
        block_size, num_groups, num_states, arrays = found
        return cls(block_size, num_groups, num_states, tuple(map(tuple, arrays)))

    def differences(self, other: Self) -> list[str]:
        """Describe the differences from another layout, the one of a cache."""
        mine, theirs = (
            {
                "block_size": each.block_size,
                "the number of groups with blocks": each.num_groups,
                "the number of groups with a state": each.num_states,
                **{path: str(kind) for path, *kind in each.arrays},
            }
            for each in (self, other)
        )
        return [
            f"{name} is {mine.get(name)}, in this cache {theirs.get(name)}"
            for name in mine | theirs
            if mine.get(name) != theirs.get(name)
        ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """Contents of a column: blocks of its groups, and a snapshot at its end."""

    # [L, ...] by path, also in files: "block.0.key_pool" of the first group with
    # blocks, "snapshot.rows.0.sum" of the first with a state, "snapshot.num_pending",
    # i32[1].
    arrays: dict[str, np.ndarray]
    # Retention class and expiry time; None: one class.
    keep: tuple[int, int] | None = dataclasses.field(default=None, metadata=STATIC)
    is_saved: bool = dataclasses.field(
        default=False, metadata=STATIC
    )  # True if a file has all of it

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def groups(self) -> set[int]:
        """Indices of the groups with a block here, among the groups with blocks."""
        paths = (path.split(".") for path in self.arrays)
        return {int(path[1]) for path in paths if path[0] == "block"}

    @property
    def has_snapshot(self) -> bool:
        return "snapshot.num_pending" in self.arrays

    def with_more(self, other: "Held") -> "Held":
        """Return the union of both contents, with the higher class and later expiry."""
        arrays = other.arrays | self.arrays
        keep = self.keep or other.keep
        if self.keep and other.keep:  # the higher class, the later time
            keep = max(self.keep[0], other.keep[0]), max(self.keep[1], other.keep[1])
        is_same = len(arrays) == len(self.arrays) and keep == self.keep
        return Held(arrays=arrays, keep=keep, is_saved=self.is_saved and is_same)

    def lowered(self, now: int) -> "Held":
        """Return this in class 0 if its class has expired."""
        if self.keep is None or self.keep[1] > now:
            return self
        return dataclasses.replace(self, keep=(0, 0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Spilled:
    """Spilled blocks in host memory, the result of `spill` and input of `restore`.

    The sequences form a tree of Q *nodes*, columns of T tokens each, parents before
    children; shared prefixes are stored once. Nodes without contents only lead to
    others. A pytree, which can be pickled.
    """

    tokens: np.ndarray  # i32[Q, T]
    parents: np.ndarray  # i32[Q], parent of each node, -1 for none
    salts: np.ndarray  # i32[Q], cache salt of each
    held: dict[int, Held]  # contents by node, ascending
    layout: Layout = dataclasses.field(metadata=STATIC)  # of the source cache

    @property
    def block_size(self) -> int:
        """Tokens of a column, T."""
        return self.tokens.shape[1]

    @property
    def num_blocks(self) -> int:
        """Number of blocks, summed over groups."""
        return sum(len(each.groups) for each in self.held.values())

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots."""
        return sum(each.has_snapshot for each in self.held.values())

    @property
    def columns(self) -> np.ndarray:
        """Position of each node in its sequence, i32[Q]."""
        columns = np.zeros(len(self.parents), np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                columns[node] = columns[parent] + 1
        return columns

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        own = sum(each.nbytes for each in (self.tokens, self.parents, self.salts))
        return own + sum(each.nbytes for each in self.held.values())

    def within(self, max_tokens: int) -> "Spilled":
        """Return the columns that end within the first `max_tokens` tokens."""
        is_kept = (self.columns + 1) * self.block_size <= max_tokens
        if is_kept.all():
            return self
        numbers = np.cumsum(is_kept, dtype=np.int32) - 1
        return Spilled(
            tokens=self.tokens[is_kept],
            parents=np.where(self.parents < 0, -1, numbers[self.parents])[is_kept],
            salts=self.salts[is_kept],
            held={
                int(numbers[node]): each
                for node, each in self.held.items()
                if is_kept[node]
            },
            layout=self.layout,
        )

    def tokens_of(self, node: int) -> np.ndarray:
        """Return the tokens of a sequence up to the end of a node, i32[n T]."""
        chain = []
        while node >= 0:
            chain.append(node)
            node = int(self.parents[node])
        return self.tokens[chain[::-1]].reshape(-1)

    def __repr__(self) -> str:
        return (
            f"Spilled({self.num_blocks} blocks, {self.num_snapshots} snapshots, of "
            f"{len(self.parents)} columns, {self.nbytes:,} bytes)"
        )


def list_snapshots(cache: Cache) -> dict[str, Any]:
    """Return the snapshots of all recurrent-state groups, [L, P, ...], by path."""
    with_state = [cache.storage[number] for number in cache.metadata.state_numbers]
    return {
        f"snapshot.{part}.{number}.{name}": array
        for number, each in enumerate(with_state)
        for part in ("rows", "inputs")
        for name, array in getattr(each, f"snapshot_{part}").items()
    }


class SpilledBuilder:
    """Builder of a `Spilled`, with each column stored once."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._known: dict[tuple[int, int, bytes], int] = {}
        self.tokens: list[np.ndarray] = []
        self.parents: list[int] = []
        self.salts: list[int] = []
        self.keep: dict[int, tuple[int, int]] = {}  # class and expiry, by node
        self._held: dict[int, dict[str, np.ndarray]] = {}

    def add(self, parent: int, salt: int, tokens: np.ndarray) -> int:
        """Return the node of a column, i32[T], below `parent`, adding it if needed."""
        key = parent, salt, tokens.tobytes()
        node = self._known.setdefault(key, len(self.parents))
        if node == len(self.parents):
            self.tokens.append(tokens)
            self.parents.append(parent)
            self.salts.append(salt)
        return node

    def add_sequence(self, salt: int, tokens: np.ndarray) -> int:
        """Add a sequence, i32[n T]; return its last node, or -1 if it is empty."""
        node = -1
        for column in tokens.reshape(-1, self._size):
            node = self.add(node, salt, column)
        return node

    def find_sequence(self, salt: int, tokens: np.ndarray) -> int:
        """Return the last node of a sequence, i32[n T]; -1 if it is missing."""
        node = -1
        for column in tokens.reshape(-1, self._size):
            key = node, salt, column.tobytes()
            if key not in self._known:
                return -1
            node = self._known[key]
        return node

    def hold(self, nodes: Iterator[int], arrays: dict[str, np.ndarray]) -> None:
        """Copy each column of arrays, [L, P, ...], to the next node."""
        for i in range(next(iter(arrays.values())).shape[1]):
            own = {path: array[:, i].copy() for path, array in arrays.items()}
            self._held.setdefault(next(nodes), {}).update(own)

    def arrays(self) -> dict[str, Any]:
        """Return the fields of `Spilled` except `layout`."""
        return {
            "tokens": np.array(self.tokens, np.int32).reshape(-1, self._size),
            "parents": np.array(self.parents, np.int32),
            "salts": np.array(self.salts, np.int32),
            "held": {
                node: Held(arrays=self._held.get(node, {}), keep=self.keep.get(node))
                for node in sorted(self._held.keys() | self.keep.keys())
            },
        }
