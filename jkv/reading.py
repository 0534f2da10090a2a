"""attend, read and the look-ups: from sequences and positions to slots and contents."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv import prefix_index, quantization, requests
from jkv.appending import Batch, check_layer
from jkv.attention import paged_attention
from jkv.config import SCALE_NAMES
from jkv.requests import Integers
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


def attend(
    cache: Cache,
    layer: jax.Array | int,
    batch: Batch,
    queries: jax.Array,
    *,
    scale: float | jax.Array | None = None,
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend causally from each row of the batch over its own sequence.

    A row sees the cached tokens of its sequence up to its own position, itself
    included, so `write` the layer first. Query head h reads kv head `h // (H / K)`.

    Args:
      cache: the cache that `write` returned.
      layer: i32[] or int, 0 to L-1; may be traced.
      batch: the plan that `append` returned.
      queries: [R, H, D], H a multiple of K.
      scale: of the scores, default 1/sqrt(D).
      window: tokens a row sees, itself counted; may be traced. `None` for all.
      soft_cap: c in `c * tanh(score / c)`.
      sinks: f32[H], a logit per head that takes part in the softmax with no value.
      return_lse: also return the log of the sum of exponentials, f32[R, H].
      implementation: `None` picks; a name forces one and fails if it does not apply.

    Returns:
      [R, H, Dv] in the queries' dtype; rows that no request owns are zero.

    Raises:
      ValueError: for queries of the wrong shape, or a cache without storage.
      NotImplementedError: if the implementation named cannot do what is asked.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids)
      >>> rows = jnp.ones((1, 1, 8))
      >>> cache = jkv.write(cache, 0, batch, rows, rows)
      >>> jkv.attend(cache, 0, batch, jnp.ones((1, 2, 8))).shape
      (1, 2, 8)
    """
    check_layer(cache, layer)
    if queries.ndim != 3 or queries.shape[0] != batch.num_rows:
        raise ValueError(
            f"queries must have shape [R, H, D] with R = {batch.num_rows}, the rows of "
            f"the batch, got {list(queries.shape)}"
        )
    return paged_attention(
        queries,
        cache.keys,
        cache.values,
        layer,
        cache.metadata.block_tables,
        batch.seq_ids,
        batch.query_starts,
        batch.query_lengths,
        batch.context_lengths,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        return_lse=return_lse,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
        kv_dtype=cache.dtype,
        value_head_dim=cache.latent_value_dim,
        max_query_length=1 if batch.is_decoding else None,
        implementation=implementation,
    )


def read(
    cache: Cache, layer: jax.Array | int, seq_id: jax.Array | int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return one sequence's keys and values of a layer in order, for tests and export.

    Args:
      cache: the cache.
      layer: i32[] or int, 0 to L-1; may be traced.
      seq_id: i32[] or int; may be traced.

    Returns:
      Keys [max_context_length, K, D] and values [max_context_length, K, Dv] in the
      cache's dtype (float32 if it is quantised), zero from `length` on, and `length`,
      i32[]: the context length, 0 for an id that is not open.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=2, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=20)
      >>> keys, values, length = jkv.read(jkv.init(config), 0, 0)
      >>> keys.shape, int(length)
      ((20, 2, 8), 0)
    """
    check_layer(cache, layer)
    length = _length(cache, seq_id)
    row = block_ids(cache, seq_id)
    most = cache.max_context_length
    valid = (jnp.arange(most, dtype=jnp.int32) < length)[:, None, None]
    layer = jnp.asarray(layer, jnp.int32)

    def gather(pool: jax.Array) -> jax.Array:
        return pool.at[layer, row].get(mode="clip")

    def in_order(blocks: jax.Array) -> jax.Array:
        tokens = blocks.swapaxes(1, 2).reshape(-1, blocks.shape[1], blocks.shape[3])
        return jnp.where(valid, tokens[:most], jnp.zeros((), tokens.dtype))

    keys, values = (in_order(blocks) for blocks in _restored(cache, gather))
    return keys, values, length


def read_slot(
    cache: Cache,
    layer: jax.Array | int,
    block_id: jax.Array | int,
    offset: jax.Array | int,
) -> tuple[jax.Array, jax.Array]:
    """Return the key [K, D] and value [K, Dv] stored in one slot, as `read` does.

    A slot outside the storage reads as zeros; what an unwritten one holds is undefined.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=2, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=20)
      >>> key, value = jkv.read_slot(jkv.init(config), 0, 3, 15)
      >>> key.shape
      (2, 8)
    """
    check_layer(cache, layer)
    layer, block_id, offset = (
        jnp.asarray(index, jnp.int32) for index in (layer, block_id, offset)
    )
    # Negative indices would wrap around.
    known = (layer >= 0) & (block_id >= 0) & (offset >= 0)
    block_id = jnp.where(known, block_id, cache.num_blocks)

    def gather(pool: jax.Array) -> jax.Array:
        return pool.at[layer, block_id, :, offset].get(mode="fill", fill_value=0)

    return _restored(cache, gather)


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
    return meta.block_tables.at[_row(cache, seq_id)].get(
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
    column, offset = meta.locate(positions)
    column = jnp.where(positions < 0, meta.max_blocks_per_sequence, column)
    found = meta.block_tables.at[_row(cache, seq_ids), column].get(
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
    valid = jnp.arange(most, dtype=jnp.int32) < _length(cache, seq_id)
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


def _restored(
    cache: Cache, gather: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return keys and values of what a function gathers from each array."""
    found = {name: gather(pool) for name, pool in cache.storage.items()}
    keys, values = (
        quantization.restore(found[name], found.get(SCALE_NAMES[name]), cache.dtype)
        if name in found
        else None
        for name in ("keys", "values")
    )
    assert keys is not None
    if values is None:
        values = keys[..., : cache.value_head_dim]
    return keys, values


def _row(cache: Cache, seq_ids: jax.Array | int) -> jax.Array:
    """Return table rows for sequence ids, S for those that are not open."""
    ids = jnp.asarray(seq_ids, jnp.int32)
    return jnp.where(requests.is_live(cache.metadata, ids), ids, cache.max_sequences)


def _length(cache: Cache, seq_id: jax.Array | int) -> jax.Array:
    """Return the context length of a sequence, i32[], 0 if it is not open."""
    return cache.metadata.context_lengths.at[_row(cache, seq_id)].get(
        mode="fill", fill_value=0
    )
