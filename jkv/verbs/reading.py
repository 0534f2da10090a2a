"""read and read_slot: what is stored, for tests and export."""

from collections.abc import Callable
from typing import Literal, overload

import jax
import jax.numpy as jnp

from jkv.config.dtypes import SCALE_NAMES
from jkv.metadata import gaps, requests
from jkv.metadata.requests import Integer
from jkv.sharding.heads import without_copies_of_heads
from jkv.sharding.mapping import gather_tokens
from jkv.state import Cache
from jkv.state.entry import takes_cache
from jkv.storage import quantization
from jkv.verbs.arguments import check_layer
from jkv.verbs.lookups import length_of, table_of


@overload
def read(
    cache: Cache, layer: Integer, seq_id: Integer, *, return_start: Literal[False] = ...
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@overload
def read(
    cache: Cache, layer: Integer, seq_id: Integer, *, return_start: Literal[True]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]: ...


@takes_cache
def read(
    cache: Cache, layer: Integer, seq_id: Integer, *, return_start: bool = False
) -> (
    tuple[jax.Array, jax.Array, jax.Array]
    | tuple[jax.Array, jax.Array, jax.Array, jax.Array]
):
    """Return one sequence's keys and values of a layer in order, for tests and export.

    Args:
      cache: the cache.
      layer: i32[] or int, 0 to L-1; may be traced.
      seq_id: i32[] or int; may be traced.
      return_start: also return where the tokens begin that a sliding window has kept,
        as `kept_from` says.

    Returns:
      Keys [max_context_length, K, D] and values [max_context_length, K, Dv] in the
      cache's dtype (float32 if it is quantised), zero from `length` on, and `length`,
      i32[]: the context length, 0 for an id that is not open. What a sliding window has
      given back is zero too: all before the start, i32[], but the blocks of the sinks.

    Raises:
      ValueError: for a layer known not to exist, or a cache without storage.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=2, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=20)
      >>> keys, values, length = jkv.read(jkv.init(config), 0, 0)
      >>> keys.shape, int(length)
      ((20, 2, 8), 0)
    """
    check_layer(cache, layer)
    *found, start = _read(cache, requests.as_index(layer), requests.as_index(seq_id))
    keys, values, length = found
    return (keys, values, length, start) if return_start else (keys, values, length)


@takes_cache
def read_slot(
    cache: Cache,
    layer: Integer,
    block_id: Integer,
    offset: Integer,
) -> tuple[jax.Array, jax.Array]:
    """Return the key and value stored in one slot.

    Args:
      cache: the cache.
      layer: i32[] or int, 0 to L-1; may be traced.
      block_id: i32[] or int; may be traced.
      offset: i32[] or int, 0 to T-1; may be traced.

    Returns:
      The key [K, D] and the value [K, Dv] in the cache's dtype, float32 if it is
      quantised. A slot outside the storage reads as zeros; what one holds that was not
      written is undefined.

    Raises:
      ValueError: for a layer known not to exist, or a cache without storage.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=2, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=20)
      >>> key, value = jkv.read_slot(jkv.init(config), 0, 3, 15)
      >>> key.shape
      (2, 8)
    """
    check_layer(cache, layer)
    return _read_slot(cache, *map(requests.as_index, (layer, block_id, offset)))


@jax.jit
def _read(
    cache: Cache, layer: jax.Array, seq_id: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    length = length_of(cache.metadata, seq_id)
    row = table_of(cache.metadata, seq_id)
    most = cache.max_context_length
    position = jnp.arange(most, dtype=jnp.int32)
    valid = position < length
    if cache.metadata.window is not None:
        valid &= gaps.is_kept(cache.metadata, seq_id, position)
    start = jnp.where(length > 0, gaps.find_start(cache.metadata, seq_id), 0)
    valid = valid[:, None, None]

    def in_order(blocks: jax.Array) -> jax.Array:
        tokens = blocks.swapaxes(1, 2).reshape(-1, blocks.shape[1], blocks.shape[3])
        return jnp.where(valid, tokens[:most], jnp.zeros((), tokens.dtype))

    # [M, K, T, ...] of each array
    keys, values = _restored(
        cache, 1, lambda pool: _whole(cache, pool.at[layer, row].get(mode="clip"), 2)
    )
    return in_order(keys), in_order(values), length, start


@jax.jit
def _read_slot(
    cache: Cache, layer: jax.Array, block_id: jax.Array, offset: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Negative indices would wrap around.
    known = (layer >= 0) & (block_id >= 0) & (offset >= 0)
    block_id = jnp.where(known, block_id, cache.num_blocks)

    def gather(pool: jax.Array) -> jax.Array:
        block = pool.at[layer, block_id].get(mode="fill", fill_value=0)
        return _whole(cache, block, 1).at[:, offset].get(mode="fill", fill_value=0)

    return _restored(cache, 0, gather)


def _whole(cache: Cache, blocks: jax.Array, place: int) -> jax.Array:
    """Return blocks with all their tokens, which stand on this axis."""
    return gather_tokens(cache.sharding, blocks, place)


def _restored(
    cache: Cache, place: int, gather: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return keys and values of what a function gathers from each array.

    Args:
      cache: the cache.
      place: the axis of what is gathered that has the heads.
      gather: the function.
    """
    found = {
        name: without_copies_of_heads(cache.sharding, gather(pool), place)
        for name, pool in cache.storage.items()
    }
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
