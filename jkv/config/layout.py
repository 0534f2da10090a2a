"""The path, shape, dtype and initial contents of every array of a cache.

A configuration's `bytes` sum up this table, `init` creates its arrays, and `check`
compares a cache with it. A new array needs one line here and one field of the state.
Arrays that all groups share are laid out by the first one.

Symbols: L layers, N blocks in the pool, K kv heads, T tokens per block, D (Dv) key
(value) head dim, S sequences, M blocks per sequence.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.counts import (
    ROW_SIZE,
    ArrayLayout,
    Arrays,
    count_bytes,
    find_leader,
    human_bytes,
    within,
)
from jkv.config.state_layout import StateSizes, lay_out_snapshots
from jkv.formats.format import Formats, name_parts
from jkv.formats.table import FORMATS
from jkv.sharding.storage_sharding import Divided, divide_pools
from jkv.status import NUM_COUNTERS

# Entries per row of the prefix index's hash tables.

_SEQUENCE_COLUMNS = 5  # of `jkv.state.SequenceRow`
_INDEX_COLUMNS = 3  # of `jkv.prefixes.arrays.IndexRow`
_I32, _U32, _BOOL = (np.dtype(dtype) for dtype in (jnp.int32, jnp.uint32, jnp.bool_))


class Sizes(NamedTuple):
    """The fields of a `CacheConfig` that determine the arrays of a group.

    All groups of a cache have equal `max_sequences`, `max_context_length` and
    `block_size`. The prefix index is a property of the cache, not of a group.
    """

    num_layers: int  # L
    num_kv_heads: int  # K
    head_dim: int  # D
    num_blocks: int  # N
    max_sequences: int  # S
    max_context_length: int
    block_size: int  # T
    value_head_dim: int  # Dv
    values_in_keys: bool
    dtype: np.dtype[Any]  # of the keys' encoding
    value_dtype: np.dtype[Any]  # of the values' encoding
    record_tokens: bool
    sliding_window: int | None
    num_sink_tokens: int
    keep_classes: int
    pruning: bool
    observed_queries: int  # W
    num_query_heads: int | None  # H; None without observed queries

    @property
    def kind(self) -> str:
        """The kind of cached data."""
        return "blocks"

    @property
    def formats(self) -> Formats:
        """The formats of keys and values."""
        return Formats(FORMATS[self.dtype], FORMATS[self.value_dtype])

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block tables, M: enough for `max_context_length` tokens."""
        return -(-self.max_context_length // self.block_size)

    def with_copies(self, copies: int) -> Self:
        """Return the sizes of a pool with `copies` replicas of each head."""
        return self._replace(num_kv_heads=self.num_kv_heads * copies)

    def divide(
        self, mesh: jax.sharding.Mesh, heads: str | None, context: str | None
    ) -> Divided:
        """Return the sharding of the arrays on a mesh, or raise ValueError."""
        paths = self.lay_out_storage()
        return divide_pools(
            self.num_kv_heads, self.block_size, paths, mesh, heads, context
        )

    def lay_out_group(self, prefix_caching: bool, has_tokens: bool) -> Arrays:
        blocks, sequences = self.num_blocks, self.max_sequences
        tables = (sequences, self.max_blocks_per_sequence)
        free = _lay_out_ring(blocks, has_holes=prefix_caching)
        if self.keep_classes > 1:
            free |= within("kept", _lay_out_kept(blocks, self.keep_classes))
        arrays = {
            "block_tables": ArrayLayout(tables, _I32, fill=blocks),
            "num_mapped_blocks": ArrayLayout((sequences,), _I32, fill=0),
            "reference_counts": ArrayLayout((blocks,), _I32, fill=0),
            **within("free_blocks", free),
        }
        if self.sliding_window is not None:
            arrays["window.num_released"] = ArrayLayout((sequences,), _I32, fill=0)
        if self.observed_queries and self.sliding_window is None:
            arrays |= within("observed", self._lay_out_observed())
        if has_tokens:
            arrays["tokens"] = ArrayLayout((blocks, self.block_size), _I32, fill=-1)
        return arrays

    def _lay_out_observed(self) -> Arrays:
        """Return the arrays of `ObservedQueries`, of the keys' dtype or bfloat16."""
        rings = self.max_sequences, self.observed_queries
        assert self.num_query_heads is not None
        shape = (self.num_layers, *rings, self.num_query_heads, self.head_dim)
        dtype = jnp.dtype(jnp.bfloat16) if self.dtype.itemsize < 2 else self.dtype
        return {
            "queries": ArrayLayout(shape, dtype, fill=0),
            "positions": ArrayLayout(rings, _I32, fill=-1),
        }

    def lay_out_storage(self, _prefix_caching: bool = False) -> Arrays:
        """Return the arrays of a `BlockStorage` by name."""
        rows = (self.num_layers, self.num_blocks, self.num_kv_heads, self.block_size)
        elements = name_parts("key", self.formats.key.arrays(self.head_dim))
        if not self.values_in_keys:
            of_values = self.formats.value.arrays(self.value_head_dim)
            elements |= name_parts("value", of_values)
        return {
            name: ArrayLayout((*rows, *element.shape), element.dtype, fill=0)
            for name, element in elements.items()
        }

    @property
    def constants(self) -> dict[str, dict[str, Any]]:
        """Static fields of the group's metadata and storage."""
        metadata: dict[str, Any] = {"block_size": self.block_size}
        if self.sliding_window is not None:
            metadata["window.length"] = self.sliding_window
            metadata["window.num_sink_tokens"] = self.num_sink_tokens
        names = "dtype", "value_dtype", "head_dim", "value_head_dim", "values_in_keys"
        storage = {name: getattr(self, name) for name in names}
        return {"metadata.groups": metadata, "storage": storage}

    def describe(self, prefix_caching: bool) -> tuple[str, str]:
        """Summarize the layers, and the blocks of the pool."""
        heads = f"{self.num_kv_heads} kv heads of {self.head_dim}"
        if self.value_head_dim != self.head_dim:
            where = " in the keys" if self.values_in_keys else ""
            heads += f" (values of {self.value_head_dim}{where})"
        what = [f"{self.num_layers} layers", heads, str(self.formats)]
        what += ["tokens recorded"] * self.record_tokens
        what += ["prefix caching"] * prefix_caching
        what += ["pruning"] * self.pruning
        if self.observed_queries and self.sliding_window is None:
            what.append(f"{self.observed_queries} observed queries")
        if self.keep_classes > 1:
            what.append(f"{self.keep_classes} classes of cached blocks")
        if self.sliding_window is not None:
            sinks = f" and {self.num_sink_tokens} sinks" * (self.num_sink_tokens > 0)
            what.append(f"a window of {self.sliding_window:,} tokens{sinks}")
        tokens = self.num_blocks * self.block_size
        each = count_bytes(self.lay_out_storage().values()) // tokens
        blocks = (
            f"{self.num_blocks:,} blocks of {self.block_size} = {tokens:,} tokens, "
            f"{human_bytes(each)} each"
        )
        return ", ".join(what), blocks


AnySizes: TypeAlias = Sizes | StateSizes


def lay_out(groups: Sequence[AnySizes], prefix_caching: bool) -> Arrays:
    """Return all arrays of a cache by path, the metadata first.

    A path joins the fields and indices that lead to an array of a `Cache`, such as
    `metadata.groups.0.free_blocks.ids` and `storage.0.key_pool`.
    """
    blocks = [each for each in groups if isinstance(each, Sizes)]
    states = [each for each in groups if isinstance(each, StateSizes)]
    leader = (
        blocks[find_leader([each.sliding_window for each in blocks])]
        if blocks
        else None
    )
    has_tokens = prefix_caching or any(each.record_tokens for each in blocks)
    max_sequences = groups[0].max_sequences
    has_pending = any(each.max_pending for each in states)
    sequences = _lay_out_sequences(max_sequences, has_pending)
    arrays = within("metadata.sequences", sequences)
    if any(each.pruning for each in blocks):
        arrays |= within("metadata.sequences.pruned", _lay_out_pruned(max_sequences))
    for i, sizes in enumerate(groups):
        of_group = sizes.lay_out_group(prefix_caching, has_tokens and sizes is leader)
        arrays |= within(f"metadata.groups.{i}", of_group)
    if prefix_caching:
        followers = [each for each in blocks if each is not leader]
        index = _lay_out_index(max_sequences, leader, followers)
        arrays |= within("metadata.index", index)
        if states:
            snapshots = lay_out_snapshots(states[0])
            arrays |= within("metadata.index.snapshots", snapshots)
    for i, each in enumerate(groups):
        arrays |= within(f"storage.{i}", each.lay_out_storage(prefix_caching))
    return arrays


def describe(
    groups: Sequence[AnySizes], prefix_caching: bool, *, numbered: bool = False
) -> list[str]:
    """Summarize the groups in two lines each, then the sequences and bytes.

    `numbered` adds the groups' numbers.
    """
    lines = []
    for number, sizes in enumerate(groups):
        first, second = sizes.describe(prefix_caching)
        lines += [f"group {number}: {first}" if numbered else first, second]
    arrays = lay_out(groups, prefix_caching)
    metadata = [a for path, a in arrays.items() if path.startswith("metadata.")]
    return [
        *lines,
        f"{groups[0].max_sequences:,} sequences of up to "
        f"{groups[0].max_context_length:,} tokens",
        f"{human_bytes(count_bytes(arrays.values()))}, "
        f"{human_bytes(count_bytes(metadata))} of it metadata",
    ]


def _lay_out_sequences(max_sequences: int, has_pending: bool) -> Arrays:
    rows = (max_sequences,)
    arrays = {
        "rows": ArrayLayout((max_sequences, _SEQUENCE_COLUMNS), _I32, fill=0),
        **within("free_rows", _lay_out_ring(max_sequences)),
        "counters": ArrayLayout((NUM_COUNTERS, 2), _U32, fill=0),
    }
    if has_pending:
        arrays["num_pending"] = ArrayLayout(rows, _I32, fill=0)
    return arrays


def _lay_out_pruned(max_sequences: int) -> Arrays:
    """Return the arrays of a `Pruned` of sequences with all their tokens."""
    array = ArrayLayout((max_sequences,), _I32, fill=0)
    return dict.fromkeys(("num_dropped", "num_left"), array)


def _lay_out_ring(count: int, *, has_holes: bool = False) -> Arrays:
    """Return the arrays of a `Ring` that holds all ids in ascending order."""
    room = 2 * count if has_holes else count
    # Head, span, count and least count so far; nothing was taken or forgotten yet.
    bounds = (0, count, count, count, 0, 0, 0, 0)
    arrays = {
        "ids": ArrayLayout((room,), _I32, fill=range(room)),
        "bounds": ArrayLayout((len(bounds),), _I32, fill=bounds),
    }
    if has_holes:
        arrays["indices"] = ArrayLayout((count,), _I32, fill=range(count))
    return arrays


def _lay_out_kept(count: int, num_classes: int) -> Arrays:
    """Return the arrays of an empty `Kept`."""
    empty = _lay_out_ring(count, has_holes=True) | {
        "bounds": ArrayLayout((8,), _I32, fill=0),
        "indices": ArrayLayout((count,), _I32, fill=-1),
    }
    arrays = {
        "classes": ArrayLayout((count,), _I32, fill=0),
        "kept_until": ArrayLayout((count,), _U32, fill=0),
        "entered": ArrayLayout((count,), _U32, fill=0),
        "num_entered": ArrayLayout((), _U32, fill=0),
    }
    for number in range(num_classes - 1):
        arrays |= within(f"rings.{number}", empty)
    return arrays


def _lay_out_index(
    max_sequences: int, leader: Sizes | None, followers: list[Sizes]
) -> Arrays:
    """Return the arrays of an empty `PrefixIndex`, without blocks if no leader."""
    blocks, sequences = leader.num_blocks if leader else 0, max_sequences
    arrays = {
        "table": ArrayLayout((2 * blocks, ROW_SIZE), _I32, fill=blocks),
        "hashes": ArrayLayout((blocks,), _U32, fill=0),
        "parents": ArrayLayout((blocks,), _I32, fill=blocks),
        "salts": ArrayLayout((blocks,), _I32, fill=0),
        "rows": ArrayLayout((sequences, _INDEX_COLUMNS), _I32, fill=0),
    }
    if leader and leader.sliding_window is not None:
        arrays["wide_hashes"] = ArrayLayout((blocks, 2), _U32, fill=0)
        arrays["hashes_above"] = ArrayLayout((blocks,), _U32, fill=0)
    for i, sizes in enumerate(followers):
        beside = {
            "partners": ArrayLayout((blocks,), _I32, fill=sizes.num_blocks),
            "beside": ArrayLayout((sizes.num_blocks,), _I32, fill=blocks),
        }
        arrays |= within(f"followers.{i}", beside)
    return arrays
