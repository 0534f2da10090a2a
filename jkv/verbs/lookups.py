"""Look-ups: from sequences and positions to blocks and slots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import requests, tables
from jkv.metadata.prefixes import prefix_index
from jkv.metadata.requests import Integers
from jkv.state import Cache


class Slots(NamedTuple):
    """Cells of tokens: where each one is stored."""

    block_ids: jax.Array  # i32[...], N where nothing is mapped
    offsets: jax.Array  # i32[...], 0 to T-1


class BlockInfo(NamedTuple):
    """State of one block."""

    reference_count: jax.Array  # i32[], table entries that name the block
    is_free: jax.Array  # bool[], whether `allocate` or `append` may take it
    is_cached: jax.Array  # bool[], whether it is free and still found by its prefix


def block_ids(cache: Cache, seq_id: jax.Array | int) -> jax.Array:
    """Return the blocks of a sequence in order, i32[M], N past the last mapped one.

    Blocks reserved ahead of the tokens count as mapped. A closed id has none.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [17])
      >>> jkv.block_ids(cache, 0).tolist()
      [0, 1, 4, 4]
    """
    meta = cache.metadata
    return meta.block_tables.at[table_row(cache, seq_id)].get(
        mode="fill", fill_value=meta.num_blocks
    )


def slots(cache: Cache, seq_ids: Integers, positions: Integers) -> Slots:
    """Return the slots of token positions, one position per sequence id.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int.
      positions: i32[B] or int; one past the tokens but in a reserved block has a slot.

    Returns:
      `Slots` of i32[B] arrays; block N where the id is not open or nothing is mapped.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [17])
      >>> jkv.slots(cache, 0, [0, 17, 40])
      Slots(block_ids=Array([0, 1, 4], dtype=int32), offsets=Array([0, 1, 0], \
dtype=int32))
    """
    seq_ids, positions = (
        jnp.asarray(a) for a in requests.broadcast(seq_ids=seq_ids, positions=positions)
    )
    meta = cache.metadata
    column, offset = tables.locate(meta, positions)
    column = jnp.where(positions < 0, meta.max_blocks_per_sequence, column)
    found = meta.block_tables.at[table_row(cache, seq_ids), column].get(
        mode="fill", fill_value=meta.num_blocks
    )
    mapped = found < meta.num_blocks
    return Slots(found, jnp.where(mapped, offset, 0))


def tokens(cache: Cache, seq_id: jax.Array | int) -> jax.Array:
    """Return the token ids recorded for a sequence, i32[max_context_length].

    Entries from the context length on are -1, as are tokens `append` was not given.

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
    recorded = cache.metadata.tokens
    if recorded is None:
        raise ValueError(
            "this cache does not record tokens; configure it with "
            "CacheConfig(record_tokens=True) and pass tokens= to append"
        )
    most = cache.max_context_length
    rows = recorded.at[block_ids(cache, seq_id)].get(mode="clip")
    valid = jnp.arange(most, dtype=jnp.int32) < length_of(cache, seq_id)
    return jnp.where(valid, rows.reshape(-1)[:most], -1)


def block_info(cache: Cache, block_id: jax.Array | int) -> BlockInfo:
    """Return the state of one block; an id outside the pool has count 0, is not free.

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
    counts = cache.metadata.reference_counts
    block_id = jnp.asarray(block_id, jnp.int32)
    known = (block_id >= 0) & (block_id < cache.num_blocks)
    count = jnp.where(known, counts.at[block_id].get(mode="clip"), 0)
    is_free = known & (count == 0)
    is_cached = is_free & prefix_index.is_indexed(cache.metadata, block_id)
    return BlockInfo(count, is_free, is_cached)


def table_row(cache: Cache, seq_ids: jax.Array | int) -> jax.Array:
    """Return table rows for sequence ids, S for those that are not open."""
    ids = jnp.asarray(seq_ids, jnp.int32)
    return jnp.where(requests.is_live(cache.metadata, ids), ids, cache.max_sequences)


def length_of(cache: Cache, seq_id: jax.Array | int) -> jax.Array:
    """Return the context length of a sequence, i32[], 0 if it is not open."""
    return cache.metadata.context_lengths.at[table_row(cache, seq_id)].get(
        mode="fill", fill_value=0
    )


def num_free_blocks(cache: Cache) -> jax.Array:
    """Return the number of blocks that can be handed out, i32[].

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [17])
      >>> int(jkv.num_free_blocks(cache))
      2
    """
    return cache.metadata.free_blocks.count
