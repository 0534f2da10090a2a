"""One group of layers in plain numpy, with what its tables say recounted.

The checks compare the metadata with it. Nothing here is shared with the verbs, so that
a fault in them cannot hide itself.
"""

from typing import NamedTuple

import jax
import numpy as np

from jkv.state import BlockGroup, Cache, Metadata


class Recount(NamedTuple):
    """A group, and what was counted anew of it; letters as in `jkv.state.metadata`."""

    name: str  # "group 1: " where there are several
    group: BlockGroup  # its arrays on the host
    lengths: np.ndarray  # i64[S], the context lengths
    is_open: np.ndarray  # bool[S]
    mapped: np.ndarray  # i64[S], blocks of each sequence, those given back too
    num_given_back: np.ndarray  # i64[S]
    owners: np.ndarray  # i64[N], table entries that name each block

    @property
    def tables(self) -> np.ndarray:
        """The block tables, i32[S, M]."""
        return np.asarray(self.group.block_tables)

    def gone(self, row: int) -> slice:
        """Return the columns of a row that were given back: those behind the sinks."""
        window, size = self.group.window, self.group.block_size
        first = -(-window.num_sink_tokens // size)
        return slice(first, first + max(int(self.num_given_back[row]), 0))

    def written(self, row: int) -> int:
        """Return how many columns of a row are full; later ones may be written."""
        return max(int(self.lengths[row]), 0) // self.group.block_size

    def held(self, row: int, columns: slice) -> np.ndarray:
        """Return the blocks that a row holds in columns, those given back left out."""
        blocks = self.tables[row, : max(self.mapped[row], 0)][columns]
        return blocks[(blocks >= 0) & (blocks < self.group.num_blocks)]


def recount(metadata: Metadata, number: int) -> Recount:
    """Count the owners of a group's blocks anew, whatever the metadata say of them."""
    group = metadata.groups[number]
    tables = np.asarray(group.block_tables)
    mapped = np.asarray(group.num_mapped_blocks, np.int64)
    entries = tables[np.arange(tables.shape[1]) < mapped[:, None]]
    entries = entries[(entries >= 0) & (entries < group.num_blocks)]
    # A window has one array, which says it; one that sees everything has none.
    (given_back,) = jax.tree.leaves(group.window) or [np.zeros(group.max_sequences)]
    return Recount(
        name=f"group {number}: " if len(metadata.groups) > 1 else "",
        group=group,
        lengths=np.asarray(metadata.context_lengths, np.int64),
        is_open=np.asarray(metadata.is_open),
        mapped=mapped,
        num_given_back=np.asarray(given_back, np.int64),
        owners=np.bincount(entries, minlength=group.num_blocks),
    )


def named_arrays(cache: Cache) -> dict[str, jax.Array]:
    """Return the arrays of metadata and storage by their names in a configuration."""
    parts = {"metadata": cache.metadata, "storage": cache.storage}
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): array
        for path, array in jax.tree_util.tree_leaves_with_path(parts)
    }
