"""compact: live blocks to the front of the pool.

Blocks get new ids by one permutation, and everything that names or holds a block
follows it: tables, reference counts, recorded tokens, prefix index, ring, keys and
values. No result depends on the ids of blocks, so attention gives the same bits.
"""

import jax
import jax.numpy as jnp

from jkv.metadata.renumbering import FreeBlocks, count_compaction, in_order, renumber
from jkv.sharding.loops import fori_loop
from jkv.state import Cache, Metadata
from jkv.state.entry import takes_cache


@takes_cache
def compact(cache: Cache) -> Cache:
    """Move live blocks to the front in sequence order, the free ones behind them.

    Live blocks are numbered as the block tables first mention them, row by row, so that
    a sequence that shares nothing has consecutive blocks. Free blocks follow in the
    order of the ring, which ascends afterwards and hands them out in the same order as
    before, cached blocks included. Pure, and fit for jit: donate the cache, and the
    storage is permuted in place with one layer as scratch. A pool that is in order
    already is not touched.

    A `Batch` holds block ids: `write` and `commit` what you `append` before compacting.

    Args:
      cache: the cache.

    Returns:
      The cache, same sequences, lengths and contents; the compactions are counted.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, block_size=4, max_sequences=2, max_context_length=16))
      >>> cache, _ = jkv.allocate(cache, [4, 8])
      >>> cache, _ = jkv.free(cache, 0)
      >>> cache = jkv.compact(cache)
      >>> jkv.block_ids(cache, 1).tolist(), jkv.stats(cache).compactions
      ([0, 1, 4, 4], 1)
    """
    metadata, source = _compact(cache.metadata)
    cache = cache.with_metadata(metadata)
    if cache.num_layers == 0:
        return cache
    moved = {name: _permute(pool, source) for name, pool in cache.storage.items()}
    return cache.with_storage(moved)


@jax.jit
def _compact(metadata: Metadata) -> tuple[Metadata, jax.Array]:
    """Return the compacted metadata, and i32[N], the old id of each block."""
    source, num_live = in_order(metadata)
    place = jnp.arange(metadata.num_blocks, dtype=jnp.int32)
    count = metadata.free_blocks.count
    free_ids = jnp.where(place < count, place + num_live, metadata.num_blocks)
    free = FreeBlocks(free_ids, count, metadata.free_blocks.fewest)
    metadata = renumber(metadata, source, free)
    return count_compaction(metadata, jnp.bool_(True)), source


@jax.jit
def _permute(array: jax.Array, source: jax.Array) -> jax.Array:
    """Move blocks, [L, N, ...], in place: layer by layer, a layer's copy at a time."""

    def permute_layer(layer: jax.Array, array: jax.Array) -> jax.Array:
        return array.at[layer].set(array.at[layer, source].get(mode="clip"))

    # No trip where every block is in its place.
    in_order = jnp.all(source == jnp.arange(source.shape[0], dtype=jnp.int32))
    trips = jnp.where(in_order, jnp.int32(0), jnp.int32(array.shape[0]))
    return fori_loop(jnp.int32(0), trips, permute_layer, array)
