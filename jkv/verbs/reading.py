"""read and read_slot: stored keys and values, for tests and export."""

import functools
from collections.abc import Callable
from typing import Literal, overload

import jax
import jax.numpy as jnp

from jkv.arguments import as_index
from jkv.formats.format import parts_of
from jkv.metadata.requests import Integer
from jkv.operations import gather
from jkv.sharding.storage_sharding import with_whole_blocks, without_copies_of_heads
from jkv.state import BlockStorage, Cache, GroupLayer, Metadata
from jkv.state.entry import locate_layer, takes_cache
from jkv.verbs.lookups import length_of, table_of


@overload
def read(
    cache: Cache,
    layer: Integer | GroupLayer,
    seq_id: Integer,
    *,
    return_start: Literal[False] = ...,
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@overload
def read(
    cache: Cache,
    layer: Integer | GroupLayer,
    seq_id: Integer,
    *,
    return_start: Literal[True],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]: ...


@takes_cache()
def read(
    cache: Cache,
    layer: Integer | GroupLayer,
    seq_id: Integer,
    *,
    return_start: bool = False,
) -> (
    tuple[jax.Array, jax.Array, jax.Array]
    | tuple[jax.Array, jax.Array, jax.Array, jax.Array]
):
    """Return one sequence's keys and values of a layer in order, for tests and export.

    Args:
      cache: the cache.
      layer: int, 0 to L-1; with one group of layers i32[], which may be traced.
      seq_id: i32[] or int; may be traced.
      return_start: also return the first token in a sliding window, as `kept_from` for
        the layer's group.

    Returns:
      Keys [max_context_length, K, D] and values [max_context_length, K, Dv] in the
      cache's dtype (float32 if it is quantized), zero from `length` on, and `length`,
      i32[]: the context length, 0 for a closed id. Tokens released by a sliding window
      are zero too: all before the start, i32[], except the blocks of the sinks.

    Raises:
      ValueError: if `layer` is an int out of range or traced with several
        groups, or the cache has no storage.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(num_kv_heads=2)
      >>> keys, values, length = jkv.read(jkv.init(config), 0, 0)
      >>> keys.shape, int(length)
      ((16, 2, 8), 0)
    """
    group, layer_in_group = locate_layer(cache, layer)
    keys, values, length, start = _read(
        cache.metadata,
        cache.storage[group],
        as_index(layer_in_group),
        as_index(seq_id),
        number=group,
    )
    return (keys, values, length, start) if return_start else (keys, values, length)


@takes_cache()
def read_slot(
    cache: Cache, layer: Integer | GroupLayer, block_id: Integer, offset: Integer
) -> tuple[jax.Array, jax.Array]:
    """Return the key and value stored in one slot.

    Args:
      cache: the cache.
      layer: int, 0 to L-1; with one group of layers i32[], which may be traced.
      block_id: i32[] or int, of the layer's group; may be traced.
      offset: i32[] or int, 0 to T-1; may be traced.

    Returns:
      The key [K, D] and the value [K, Dv] in the cache's dtype, float32 if it is
      quantized. Slots outside the storage read as zeros; unwritten slots are undefined.

    Raises:
      ValueError: if `layer` is an int out of range or traced with several
        groups, or the cache has no storage.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(num_kv_heads=2)
      >>> key, value = jkv.read_slot(jkv.init(config), 0, 3, 15)
      >>> key.shape
      (2, 8)
    """
    group, layer_in_group = locate_layer(cache, layer)
    index = map(as_index, (layer_in_group, block_id, offset))
    return _read_slot(cache.storage[group], *index)


@functools.partial(jax.jit, static_argnames="number")
def _read(
    metadata: Metadata,
    storage: BlockStorage,
    layer: jax.Array,
    seq_id: jax.Array,
    *,
    number: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    group = metadata.groups[number]
    length = length_of(metadata, seq_id)
    row = table_of(metadata, seq_id, number=number)
    most = metadata.max_context_length
    position = jnp.arange(most, dtype=jnp.int32)
    valid = position < length
    valid &= group.window.is_kept(seq_id, position, group.block_size)
    start = group.window.starts_of(seq_id, group.block_size)
    start = jnp.where(length > 0, start, 0)
    valid = valid[:, None, None]

    def in_order(blocks: jax.Array) -> jax.Array:
        tokens = blocks.swapaxes(1, 2).reshape(-1, blocks.shape[1], blocks.shape[3])
        return jnp.where(valid, tokens[:most], jnp.zeros((), tokens.dtype))

    def read_pool(pool: jax.Array) -> jax.Array:
        blocks = gather(pool, (layer, row))  # [M, K, T, ...]
        return with_whole_blocks(storage.sharding, blocks, 2)

    keys, values = _restored(storage, 1, read_pool)
    return in_order(keys), in_order(values), length, start


@jax.jit
def _read_slot(
    storage: BlockStorage, layer: jax.Array, block_id: jax.Array, offset: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Negative indices would wrap around.
    known = (layer >= 0) & (block_id >= 0) & (offset >= 0)
    block_id = jnp.where(known, block_id, storage.num_blocks)

    def read_pool(pool: jax.Array) -> jax.Array:
        block = gather(pool, (layer, block_id), fill=0)
        block = with_whole_blocks(storage.sharding, block, 1)
        return block.at[:, offset].get(mode="fill", fill_value=0)

    return _restored(storage, 0, read_pool)


def _restored(
    storage: BlockStorage, head_axis: int, read_pool: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Decode keys and values after `read_pool` of each array, heads on `head_axis`."""
    found = {
        name: without_copies_of_heads(storage.sharding, read_pool(pool), head_axis)
        for name, pool in storage.arrays.items()
    }
    keys = storage.formats.key.read(parts_of("key", found))
    if storage.values_in_keys:
        return keys, keys[..., : storage.value_head_dim]
    return keys, storage.formats.value.read(parts_of("value", found))
