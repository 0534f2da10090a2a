"""Every array of a cache: its name, its shape, its dtype and what a fresh one holds.

`CacheConfig.bytes` adds this table up, `init` makes what stands in it, and `check`
compares a cache with it. A new array is one line here and one field of the state.

Symbols: L layers, N blocks in the pool, K kv heads, T tokens per block, D (Dv) key
(value) head dim, S sequences, M blocks per sequence.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jkv.attention.elements import STORED_AS
from jkv.config.dtypes import SCALE_DTYPE, SCALE_NAMES, needs_scales
from jkv.status import NUM_COUNTERS

# One number for all elements, the numbers of a short array, or those of a long one.
Fill: TypeAlias = int | tuple[int, ...] | range

# Places in a row of the prefix index's hash tables.
BUCKET_SIZE, CHILDREN_SIZE = 8, 16

_I32, _U32, _BOOL = (np.dtype(dtype) for dtype in (jnp.int32, jnp.uint32, jnp.bool_))


class Sizes(NamedTuple):
    """What decides the arrays of a cache, by the names in `CacheConfig`."""

    num_layers: int  # L
    num_kv_heads: int  # K
    head_dim: int  # D
    num_blocks: int  # N
    max_sequences: int  # S
    max_context_length: int
    block_size: int  # T
    value_head_dim: int  # Dv
    values_in_keys: bool
    dtype: np.dtype[Any]  # that the stored bits mean
    record_tokens: bool
    prefix_caching: bool
    sliding_window: int | None
    num_sink_tokens: int

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block tables, M: enough for `max_context_length` tokens."""
        return -(-self.max_context_length // self.block_size)


class ArrayLayout(NamedTuple):
    """One array of a cache."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Fill

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def lay_out(sizes: Sizes) -> dict[str, ArrayLayout]:
    """Return all arrays of a cache by name: those of the metadata, then the storage.

    Args:
      sizes: of the cache.

    Returns:
      The arrays of `Metadata` by the fields that lead to them, such as
      `free_blocks.ids`, and those of `Cache.storage` by theirs.
    """
    return lay_out_metadata(sizes) | lay_out_storage(sizes)


def lay_out_metadata(sizes: Sizes) -> dict[str, ArrayLayout]:
    """Return the arrays of `Metadata` by name."""
    blocks, sequences = sizes.num_blocks, sizes.max_sequences
    tables = (sequences, sizes.max_blocks_per_sequence)
    # An index leaves holes in the ring of blocks, which has room for N of them.
    room = blocks * (1 + sizes.prefix_caching)
    arrays = {
        "block_tables": ArrayLayout(tables, _I32, fill=blocks),
        "context_lengths": ArrayLayout((sequences,), _I32, fill=0),
        "num_mapped_blocks": ArrayLayout((sequences,), _I32, fill=0),
        "is_open": ArrayLayout((sequences,), _BOOL, fill=False),
        "reference_counts": ArrayLayout((blocks,), _I32, fill=0),
        "free_blocks.ids": ArrayLayout((room,), _I32, fill=range(room)),
        "free_blocks.bounds": _full_ring(blocks),
        "free_sequences.ids": ArrayLayout((sequences,), _I32, fill=range(sequences)),
        "free_sequences.bounds": _full_ring(sequences),
        "created": ArrayLayout((sequences,), _U32, fill=0),
        "last_used": ArrayLayout((sequences,), _U32, fill=0),
        "num_uses": ArrayLayout((sequences,), _U32, fill=0),
        "counters": ArrayLayout((NUM_COUNTERS, 2), _U32, fill=0),
    }
    if sizes.record_tokens or sizes.prefix_caching:
        arrays["tokens"] = ArrayLayout((blocks, sizes.block_size), _I32, fill=-1)
    if sizes.sliding_window is not None:
        arrays["window.num_given_back"] = ArrayLayout((sequences,), _I32, fill=0)
    if sizes.prefix_caching:
        arrays |= _lay_out_index(blocks, sequences)
        if sizes.sliding_window is not None:
            arrays["prefix.wide_hashes"] = ArrayLayout((blocks, 2), _U32, fill=0)
            arrays["prefix.hashes_above"] = ArrayLayout((blocks,), _U32, fill=0)
    return arrays


def lay_out_storage(sizes: Sizes) -> dict[str, ArrayLayout]:
    """Return the arrays of `Cache.storage` by name: [L, N, K, T, D], [L, N, K, T]."""
    rows = (sizes.num_layers, sizes.num_blocks, sizes.num_kv_heads, sizes.block_size)
    widths = {"keys": sizes.head_dim}
    if not sizes.values_in_keys:
        widths["values"] = sizes.value_head_dim
    stored = STORED_AS[sizes.dtype]
    arrays = {
        name: ArrayLayout((*rows, width), stored, fill=0)
        for name, width in widths.items()
    }
    if needs_scales(sizes.dtype):
        scale = ArrayLayout(rows, STORED_AS[SCALE_DTYPE], fill=0)
        arrays |= {SCALE_NAMES[name]: scale for name in widths}
    return arrays


def _full_ring(count: int) -> ArrayLayout:
    """Bounds of a ring that holds all ids: head, span, count, fewest so far."""
    return ArrayLayout((4,), _I32, fill=(0, count, count, count))


def _lay_out_index(blocks: int, sequences: int) -> dict[str, ArrayLayout]:
    """Return the arrays of an empty `PrefixIndex`."""
    return {
        "prefix.buckets": ArrayLayout((blocks, BUCKET_SIZE), _I32, fill=blocks),
        "prefix.children": ArrayLayout((blocks, CHILDREN_SIZE), _I32, fill=blocks),
        "prefix.hashes": ArrayLayout((blocks,), _U32, fill=0),
        "prefix.parents": ArrayLayout((blocks,), _I32, fill=blocks),
        "prefix.salts": ArrayLayout((blocks,), _I32, fill=0),
        "prefix.positions": ArrayLayout((blocks,), _I32, fill=range(blocks)),
        "prefix.committed": ArrayLayout((sequences,), _I32, fill=0),
        "prefix.sequence_salts": ArrayLayout((sequences,), _I32, fill=0),
        "prefix.epochs": ArrayLayout((sequences,), _U32, fill=0),
    }
