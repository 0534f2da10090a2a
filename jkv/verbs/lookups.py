"""Look-ups: blocks and slots of sequences and positions."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import as_index
from jkv.metadata import requests, tables
from jkv.metadata.requests import Integer, Integers
from jkv.operations import gather
from jkv.state import BlockGroup, Cache, Metadata, Slots
from jkv.state.batch import check_group
from jkv.state.entry import takes_cache
from jkv.status import UsageError


class BlockInfo(NamedTuple):
    """State of one block."""

    reference_count: jax.Array  # i32[], table entries that name the block
    is_free: jax.Array  # bool[], True if `allocate` or `append` may take it
    is_cached: jax.Array  # bool[], True if it is free and in the prefix index


@takes_cache()
def block_ids(cache: Cache, seq_id: Integer, *, group: int | None = None) -> jax.Array:
    """Return the blocks of a sequence in order.

    Includes reserved blocks.

    Args:
      cache: the cache.
      seq_id: i32[] or int; may be traced.
      group: index of the group of layers; optional if there is only one.

    Returns:
      i32[M], N for unmapped columns and for blocks released by a sliding window; all N
      for a closed id.

    Raises:
      UsageError: if `group` is missing and there are several, or it does not exist.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=4, max_sequences=2,
      ...     max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [17])
      >>> jkv.block_ids(cache, 0).tolist()
      [0, 1, 4, 4]
    """
    chosen = group_of(cache, group, "block_ids")
    return table_of(cache.metadata, as_index(seq_id), number=chosen)


@takes_cache()
def slots(
    cache: Cache, seq_ids: Integers, positions: Integers, *, group: int | None = None
) -> Slots:
    """Return the slots of token positions, one position per sequence id.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int.
      positions: i32[B] or int; positions in reserved blocks have slots.
      group: index of the group of layers; optional if there is only one.

    Returns:
      `Slots` of i32[B] arrays; block N if the id is not open, the position is not
      mapped, or a sliding window has released it.

    Raises:
      ValueError: if an argument is not integral, has more than one axis, or differs in
        length.
      UsageError: if `group` is missing and there are several, or it does not exist.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=4, max_sequences=2,
      ...     max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [17])
      >>> jkv.slots(cache, 0, [0, 17, 40])
      Slots(block_ids=Array([0, 1, 4], dtype=int32), offsets=Array([0, 1, 0], \
dtype=int32))
    """
    chosen = group_of(cache, group, "slots")
    arrays = requests.broadcast(seq_ids=seq_ids, positions=positions)
    return _slots(cache.metadata, *arrays, number=chosen)


@takes_cache()
def tokens(cache: Cache, seq_id: Integer) -> jax.Array:
    """Return the token ids recorded for a sequence.

    Args:
      cache: a cache with `record_tokens` or `prefix_caching`.
      seq_id: i32[] or int; may be traced.

    Returns:
      i32[max_context_length], -1 from the context length on, for tokens appended
      without ids, and for tokens released by a sliding window. With several groups the
      one with the largest window records them.

    Raises:
      ValueError: if the cache records no tokens.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig.toy(record_tokens=True)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, _ = jkv.append(cache, [0], [3], capacity=4,
      ...     tokens=jnp.array([7, 8, 9, 0]))
      >>> jkv.tokens(cache, 0).tolist()
      [7, 8, 9, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1]
    """
    if not cache.metadata.records_tokens:
        raise ValueError(
            "this cache does not record tokens; configure it with "
            "CacheConfig(record_tokens=True) and pass tokens= to append"
        )
    return _tokens(cache.metadata, as_index(seq_id))


@takes_cache()
def block_info(
    cache: Cache, block_id: Integer, *, group: int | None = None
) -> BlockInfo:
    """Return the state of one block.

    Args:
      cache: the cache.
      block_id: i32[] or int; may be traced.
      group: index of the group of layers; optional if there is only one.

    Returns:
      A `BlockInfo`; an id outside the pool has count 0 and is not free.

    Raises:
      UsageError: if `group` is missing and there are several, or it does not exist.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=4, max_sequences=2,
      ...     max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [17])
      >>> int(jkv.block_info(cache, 1).reference_count)
      1
      >>> bool(jkv.block_info(cache, 2).is_free)
      True
    """
    chosen = group_of(cache, group, "block_info")
    return _block_info(cache.metadata, as_index(block_id), number=chosen)


@takes_cache()
def context_lengths(cache: Cache) -> jax.Array:
    """Return the number of cached tokens of each sequence.

    Args:
      cache: the cache.

    Returns:
      i32[max_sequences] by sequence id, 0 for closed ones.

    Example:
      >>> import jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0, 0])
      >>> cache, _ = jkv.append(cache, opened.seq_ids, [5, 2], capacity=8)
      >>> jkv.context_lengths(cache).tolist()
      [5, 2, 0, 0]
    """
    # A copy, because the cache may be donated while the lengths are in use.
    return jnp.copy(cache.metadata.context_lengths)


@takes_cache()
def next_positions(cache: Cache) -> jax.Array:
    """Return the position of each sequence's next token.

    The context length, and the tokens that `prune` dropped without rotation.

    Args:
      cache: the cache.

    Returns:
      i32[max_sequences] by sequence id, 0 for closed ones.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(pruning=True, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), 0)
      >>> cache, _ = jkv.append(cache, 0, 20, capacity=20)
      >>> cache, _ = jkv.prune(cache, 0, [[0, 1, 18, 19]], 4)
      >>> jkv.next_positions(cache).tolist(), jkv.context_lengths(cache).tolist()
      ([20, 0, 0, 0], [4, 0, 0, 0])
    """
    lengths = jnp.copy(cache.metadata.context_lengths)
    rows = jnp.arange(cache.max_sequences, dtype=jnp.int32)
    return cache.metadata.sequences.pruned.positions_of(rows, lengths)


@takes_cache()
def kept_from(cache: Cache, *, group: int | None = None) -> jax.Array:
    """Return the first position of each sequence that is cached without a gap.

    0 without a sliding window. With one, `append` releases the blocks before it, except
    those of the sinks at the beginning.

    Args:
      cache: the cache.
      group: index of a group of layers. None with several: the position from which all
        groups have the tokens.

    Returns:
      i32[max_sequences] by sequence id, a multiple of `block_size`; 0 for closed
      sequences and for complete ones.

    Raises:
      UsageError: if the group does not exist.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(max_sequences=2, max_context_length=64,
      ...     sliding_window=8)
      >>> cache, opened = jkv.allocate(jkv.init(config), 0)
      >>> for _ in range(3):
      ...     cache, _ = jkv.append(cache, 0, 7, capacity=7)
      >>> jkv.context_lengths(cache).tolist(), jkv.kept_from(cache).tolist()
      ([21, 0], [4, 0])
    """
    groups = cache.metadata.block_groups
    if group is not None:
        groups = (cache.metadata.groups[group_of(cache, group, "kept_from")],)
    rows = jnp.arange(cache.max_sequences, dtype=jnp.int32)
    starts = [each.window.starts_of(rows, each.block_size) for each in groups]
    if not starts:
        return jnp.zeros_like(rows)
    return functools.reduce(jnp.maximum, starts)


@takes_cache()
def num_free_blocks(cache: Cache) -> jax.Array:
    """Return the number of blocks that can be allocated.

    Args:
      cache: the cache.

    Returns:
      i32[]; cached blocks count as free. With several groups of layers the smallest
      number; if no group has blocks, the largest i32.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=4, max_sequences=2,
      ...     max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [17])
      >>> int(jkv.num_free_blocks(cache))
      2
    """
    counts = [group.free_blocks.count for group in cache.metadata.block_groups]
    if not counts:
        return jnp.int32(jnp.iinfo(jnp.int32).max)
    return functools.reduce(jnp.minimum, counts)


@functools.partial(jax.jit, static_argnames="number")
def table_of(metadata: Metadata, seq_id: jax.Array, *, number: int) -> jax.Array:
    """Return a sequence's row of a group's block tables, i32[M], all N if closed."""
    group = metadata.groups[number]
    return gather(group.block_tables, row_of(metadata, seq_id), fill=group.num_blocks)


@jax.jit
def length_of(metadata: Metadata, seq_id: jax.Array) -> jax.Array:
    """Return the context length of a sequence, i32[], 0 if it is not open."""
    return gather(metadata.context_lengths, row_of(metadata, seq_id), fill=0)


@functools.partial(jax.jit, static_argnames="number")
def _slots(
    metadata: Metadata, seq_ids: jax.Array, positions: jax.Array, *, number: int
) -> Slots:
    group: BlockGroup = metadata.groups[number]
    column, offset = tables.locate(positions, group.block_size)
    column = jnp.where(positions < 0, group.max_blocks_per_sequence, column)
    found = gather(
        group.block_tables, (row_of(metadata, seq_ids), column), fill=group.num_blocks
    )
    return Slots(found, jnp.where(found < group.num_blocks, offset, 0))


@jax.jit
def _tokens(metadata: Metadata, seq_id: jax.Array) -> jax.Array:
    most = metadata.max_context_length
    position = jnp.arange(most, dtype=jnp.int32)
    valid = position < length_of(metadata, seq_id)
    if metadata.tokens is None:  # no group has blocks
        recorded = metadata.index.tokens_of(metadata, row_of(metadata, seq_id))
    else:
        group = metadata.leading
        table = table_of(metadata, seq_id, number=metadata.leader)
        recorded = gather(metadata.tokens, table).reshape(-1)[:most]
        valid &= group.window.is_kept(seq_id, position, group.block_size)
    return jnp.where(valid, recorded, -1)


@functools.partial(jax.jit, static_argnames="number")
def _block_info(metadata: Metadata, block_id: jax.Array, *, number: int) -> BlockInfo:
    group = metadata.groups[number]
    known = (block_id >= 0) & (block_id < group.num_blocks)
    count = jnp.where(known, gather(group.reference_counts, block_id), 0)
    is_free = known & (count == 0)
    is_cached = is_free & metadata.index.knows(metadata, number, block_id)
    return BlockInfo(count, is_free, is_cached)


def row_of(metadata: Metadata, seq_ids: jax.Array) -> jax.Array:
    """Return table rows of sequence ids, i32[...], S for closed ones."""
    return jnp.where(
        requests.is_live(metadata, seq_ids), seq_ids, metadata.max_sequences
    )


def group_of(cache: Cache, group: int | None, name: str) -> int:
    """Return the checked index of a group with blocks."""
    numbers = cache.metadata.block_numbers
    num_groups = len(numbers)
    if group is None and num_groups == 1:
        return numbers[0]
    if group is None:
        raise UsageError(
            f"{name} needs group=, this cache has {num_groups} groups of layers with "
            f"blocks; pass one, as in {name}(cache, ..., group=0)"
            if num_groups
            else f"{name} needs a group with blocks, and this cache has none"
        )
    if not isinstance(group, int | np.integer):
        last = len(cache.storage) - 1
        raise UsageError(f"group must be in 0..{last}, got {group!r}")
    check_group(int(group), [i in numbers for i in range(len(cache.storage))])
    return int(group)
