"""One group of layers in numpy, with its reference counts recomputed from the tables.

The checks compare the metadata with it. It shares no code with the verbs, so that a bug
in them cannot hide itself.
"""

from typing import NamedTuple

import jax
import numpy as np

from jkv.state import BlockGroup, Cache, Metadata


class Recount(NamedTuple):
    """A group with recomputed counts; symbols as in `jkv.state.metadata`."""

    name: str  # "group 1: " with several groups, else empty
    group: BlockGroup  # its arrays on the host
    lengths: np.ndarray  # i64[S], the context lengths
    is_open: np.ndarray  # bool[S]
    mapped: np.ndarray  # i64[S], blocks of each sequence, released ones included
    num_released: np.ndarray  # i64[S]
    owners: np.ndarray  # i64[N], number of table entries of each block
    is_pruned: np.ndarray  # bool[S]

    @property
    def tables(self) -> np.ndarray:
        """The block tables, i32[S, M]."""
        return np.asarray(self.group.block_tables)

    def gone(self, row: int) -> slice:
        """Return the columns of a row that a window released, after its sink tokens."""
        window, size = self.group.window, self.group.block_size
        first = -(-window.num_sink_tokens // size)
        return slice(first, first + max(int(self.num_released[row]), 0))

    def written(self, row: int) -> int:
        """Return the number of full columns of a row; later ones are writable."""
        return max(int(self.lengths[row]), 0) // self.group.block_size

    def held(self, row: int, columns: slice) -> np.ndarray:
        """Return the blocks of a row in `columns`, without released ones."""
        blocks = self.tables[row, : max(self.mapped[row], 0)][columns]
        return blocks[(blocks >= 0) & (blocks < self.group.num_blocks)]


def recount(metadata: Metadata, number: int) -> Recount:
    """Recompute the reference counts of a group's blocks from its tables."""
    group = metadata.groups[number]
    tables = np.asarray(group.block_tables)
    mapped = np.asarray(group.num_mapped_blocks, np.int64)
    entries = tables[np.arange(tables.shape[1]) < mapped[:, None]]
    entries = entries[(entries >= 0) & (entries < group.num_blocks)]
    # A sliding window has one array, the released counts; full attention has none.
    (released,) = jax.tree.leaves(group.window) or [np.zeros(group.max_sequences)]
    return Recount(
        name=f"group {number}: " if len(metadata.groups) > 1 else "",
        group=group,
        lengths=np.asarray(metadata.context_lengths, np.int64),
        is_open=np.asarray(metadata.is_open),
        mapped=mapped,
        num_released=np.asarray(released, np.int64),
        owners=np.bincount(entries, minlength=group.num_blocks),
        is_pruned=_find_pruned(metadata),
    )


def _find_pruned(metadata: Metadata) -> np.ndarray:
    """Return True for sequences with dropped tokens, bool[S]."""
    counts = jax.tree.leaves(metadata.sequences.pruned)
    none = np.zeros(metadata.max_sequences, bool)
    return np.any([none, *(np.asarray(each) > 0 for each in counts)], axis=0)


def named_arrays(cache: Cache) -> dict[str, jax.Array]:
    """Return the arrays of metadata and storage by name, as in `CacheConfig.arrays`."""
    parts = {"metadata": cache.metadata, "storage": cache.storage}
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): array
        for path, array in jax.tree_util.tree_leaves_with_path(parts)
    }
