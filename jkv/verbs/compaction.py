"""compact: move live blocks to the front of the pool.

One permutation renumbers the blocks of a group, in tables, reference counts, recorded
tokens, prefix index, ring, keys and values. No result depends on block ids, so
attention is bit-identical.
"""

import jax
import jax.numpy as jnp

from jkv.blocks.renumbering import FreeBlocks, count_compaction, in_order, renumber
from jkv.operations import fori_loop, gather
from jkv.state import Cache, Metadata
from jkv.state.entry import takes_cache


@takes_cache()
def compact(cache: Cache) -> Cache:
    """Move live blocks to the front in sequence order, followed by the free ones.

    Each group's pool is compacted. Live blocks are numbered by their first occurrence
    in the block tables, row by row, so a sequence without shared blocks becomes
    contiguous. Free blocks follow in eviction order, cached ones included, and the ring
    is ascending afterwards. Works under jit: with donation the storage is permuted in
    place, with one layer as scratch. A compact pool is not copied.

    A `Batch` holds block ids: `write` and `commit` a step before compacting.

    Args:
      cache: the cache.

    Returns:
      The cache with the same sequences, lengths and contents, and one more compaction.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> cache, _ = jkv.allocate(cache, [4, 8])
      >>> cache, _ = jkv.free(cache, 0)
      >>> cache = jkv.compact(cache)
      >>> jkv.block_ids(cache, 1).tolist(), jkv.stats(cache).compactions
      ([0, 1, 8, 8], 1)
    """
    metadata, sources = _compact(cache.metadata)
    cache = cache.with_metadata(metadata)
    for number, source in sources.items():
        storage = cache.storage[number]
        if storage.num_layers:
            moved = {n: _permute(pool, source) for n, pool in storage.arrays.items()}
            cache = cache.with_group_storage(number, storage.with_arrays(moved))
    return cache


@jax.jit
def _compact(metadata: Metadata) -> tuple[Metadata, dict[int, jax.Array]]:
    """Return the compacted metadata, and the blocks' old ids by group, i32[N]."""
    sources = {}
    for number in metadata.block_numbers:
        group = metadata.groups[number]
        source, num_live = in_order(group)
        # The free blocks come after the live ones.
        rank, count = jnp.arange(len(source), dtype=jnp.int32), group.free_blocks.count
        ids = jnp.where(rank < count, rank + num_live, len(source))
        free = FreeBlocks(ids, count, group.free_blocks.fewest)
        metadata = renumber(metadata, number, source, free)
        sources[number] = source
    return count_compaction(metadata), sources


@jax.jit
def _permute(array: jax.Array, source: jax.Array) -> jax.Array:
    """Permute blocks, [L, N, ...], in place, with a copy of one layer at a time."""

    def permute_layer(layer: jax.Array, array: jax.Array) -> jax.Array:
        return array.at[layer].set(gather(array, (layer, source)))

    # No trips if every block stays in place.
    in_order = jnp.all(source == jnp.arange(source.shape[0], dtype=jnp.int32))
    trips = jnp.where(in_order, jnp.int32(0), jnp.int32(array.shape[0]))
    return fori_loop(jnp.int32(0), trips, permute_layer, array)
