"""Look-ups: from sequences and positions to blocks and slots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import gaps, requests, tables
from jkv.metadata.prefixes import prefix_index
from jkv.metadata.requests import Integer, Integers
from jkv.state import Cache, Metadata, Slots
from jkv.state.entry import takes_cache


class BlockInfo(NamedTuple):
    """State of one block."""

    reference_count: jax.Array  # i32[], table entries that name the block
    is_free: jax.Array  # bool[], whether `allocate` or `append` may take it
    is_cached: jax.Array  # bool[], whether it is free and still found by its prefix


@takes_cache
def block_ids(cache: Cache, seq_id: Integer) -> jax.Array:
    """Return the blocks of a sequence in order.

    Blocks reserved ahead of the tokens count as mapped.

    Args:
      cache: the cache.
      seq_id: i32[] or int; may be traced.

    Returns:
      i32[M], N from the first column on that maps no block, and where a sliding window
      has given blocks back; all N for a closed id.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [17])
      >>> jkv.block_ids(cache, 0).tolist()
      [0, 1, 4, 4]
    """
    return table_of(cache.metadata, requests.as_index(seq_id))


@takes_cache
def slots(cache: Cache, seq_ids: Integers, positions: Integers) -> Slots:
    """Return the slots of token positions, one position per sequence id.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int.
      positions: i32[B] or int; one past the tokens but in a reserved block has a slot.

    Returns:
      `Slots` of i32[B] arrays; block N where the id is not open, nothing is mapped, or
      a sliding window has given the token back.

    Raises:
      ValueError: for arguments that are no integers, have more than one axis, or differ
        in length.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [17])
      >>> jkv.slots(cache, 0, [0, 17, 40])
      Slots(block_ids=Array([0, 1, 4], dtype=int32), offsets=Array([0, 1, 0], \
dtype=int32))
    """
    return _slots(
        cache.metadata, *requests.broadcast(seq_ids=seq_ids, positions=positions)
    )


@takes_cache
def tokens(cache: Cache, seq_id: Integer) -> jax.Array:
    """Return the token ids recorded for a sequence.

    Args:
      cache: a cache with `record_tokens` or `prefix_caching`.
      seq_id: i32[] or int; may be traced.

    Returns:
      i32[max_context_length], -1 from the context length on, for tokens that `append`
      was not told, and for those that a sliding window has given back.

    Raises:
      ValueError: if the cache does not record tokens.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=6, record_tokens=True)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, _ = jkv.append(cache, [0], [3], capacity=4,
      ...     tokens=jnp.array([7, 8, 9, 0]))
      >>> jkv.tokens(cache, 0).tolist()
      [7, 8, 9, -1, -1, -1]
    """
    if cache.metadata.tokens is None:
        raise ValueError(
            "this cache does not record tokens; configure it with "
            "CacheConfig(record_tokens=True) and pass tokens= to append"
        )
    return _tokens(cache.metadata, cache.metadata.tokens, requests.as_index(seq_id))


@takes_cache
def block_info(cache: Cache, block_id: Integer) -> BlockInfo:
    """Return the state of one block.

    Args:
      cache: the cache.
      block_id: i32[] or int; may be traced.

    Returns:
      A `BlockInfo`; an id outside the pool has count 0 and is not free.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [17])
      >>> int(jkv.block_info(cache, 1).reference_count)
      1
      >>> bool(jkv.block_info(cache, 2).is_free)
      True
    """
    return _block_info(cache.metadata, requests.as_index(block_id))


@takes_cache
def context_lengths(cache: Cache) -> jax.Array:
    """Return the number of tokens that each sequence has in the cache.

    Args:
      cache: the cache.

    Returns:
      i32[max_sequences] by sequence id, 0 for those that are not open.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=3, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0, 0])
      >>> cache, _ = jkv.append(cache, opened.seq_ids, [5, 2], capacity=8)
      >>> jkv.context_lengths(cache).tolist()
      [5, 2, 0]
    """
    # A copy: the cache may be donated while the lengths are in use.
    return jnp.copy(cache.metadata.context_lengths)


@takes_cache
def kept_from(cache: Cache) -> jax.Array:
    """Return the position from which each sequence has its tokens in the cache.

    Without a sliding window that is 0. With one, `append` gives back the blocks of the
    tokens before it, but for those of the sinks, which come first.

    Args:
      cache: the cache.

    Returns:
      i32[max_sequences] by sequence id, a multiple of `block_size`; 0 for sequences
      that have all their tokens, and for those that are not open.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=64,
      ...     sliding_window=8)
      >>> cache, opened = jkv.allocate(jkv.init(config), 0)
      >>> for _ in range(3):
      ...     cache, _ = jkv.append(cache, 0, 7, capacity=7)
      >>> jkv.context_lengths(cache).tolist(), jkv.kept_from(cache).tolist()
      ([21, 0], [4, 0])
    """
    rows = jnp.arange(cache.max_sequences, dtype=jnp.int32)
    return gaps.find_start(cache.metadata, rows)


@takes_cache
def num_free_blocks(cache: Cache) -> jax.Array:
    """Return the number of blocks that can be handed out.

    Args:
      cache: the cache.

    Returns:
      i32[]; cached blocks count as free.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [17])
      >>> int(jkv.num_free_blocks(cache))
      2
    """
    return cache.metadata.free_blocks.count


@jax.jit
def table_of(metadata: Metadata, seq_id: jax.Array) -> jax.Array:
    """Return the row of the block tables of a sequence, i32[M], N if it is closed."""
    return metadata.block_tables.at[_row(metadata, seq_id)].get(
        mode="fill", fill_value=metadata.num_blocks
    )


@jax.jit
def length_of(metadata: Metadata, seq_id: jax.Array) -> jax.Array:
    """Return the context length of a sequence, i32[], 0 if it is not open."""
    return metadata.context_lengths.at[_row(metadata, seq_id)].get(
        mode="fill", fill_value=0
    )


@jax.jit
def _slots(metadata: Metadata, seq_ids: jax.Array, positions: jax.Array) -> Slots:
    column, offset = tables.locate(metadata, positions)
    column = jnp.where(positions < 0, metadata.max_blocks_per_sequence, column)
    found = metadata.block_tables.at[_row(metadata, seq_ids), column].get(
        mode="fill", fill_value=metadata.num_blocks
    )
    return Slots(found, jnp.where(found < metadata.num_blocks, offset, 0))


@jax.jit
def _tokens(metadata: Metadata, recorded: jax.Array, seq_id: jax.Array) -> jax.Array:
    most = metadata.max_context_length
    rows = recorded.at[table_of(metadata, seq_id)].get(mode="clip")
    position = jnp.arange(most, dtype=jnp.int32)
    valid = position < length_of(metadata, seq_id)
    if metadata.window is not None:
        valid &= gaps.is_kept(metadata, seq_id, position)
    return jnp.where(valid, rows.reshape(-1)[:most], -1)


@jax.jit
def _block_info(metadata: Metadata, block_id: jax.Array) -> BlockInfo:
    counts = metadata.reference_counts
    known = (block_id >= 0) & (block_id < metadata.num_blocks)
    count = jnp.where(known, counts.at[block_id].get(mode="clip"), 0)
    is_free = known & (count == 0)
    is_cached = is_free & prefix_index.is_indexed(metadata, block_id)
    return BlockInfo(count, is_free, is_cached)


def _row(metadata: Metadata, seq_ids: jax.Array) -> jax.Array:
    """Return table rows for sequence ids, i32[...], S for those that are not open."""
    return jnp.where(
        requests.is_live(metadata, seq_ids), seq_ids, metadata.max_sequences
    )
