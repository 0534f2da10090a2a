"""resize: a pool of another size for the same sequences.

Arrays have new shapes, so this is for the host, between steps. Which blocks stay is
planned in numpy; what names or holds a block then follows as in `compact`.
"""

import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.counts import checked_num_blocks
from jkv.config.units import human_bytes
from jkv.metadata import counters
from jkv.metadata.prefixes.rebuilding import reenter
from jkv.metadata.renumbering import FreeBlocks, count_compaction, in_order, renumber
from jkv.state import Cache, Metadata
from jkv.state.entry import for_host
from jkv.status import Counter

logger = logging.getLogger("jkv.resizing")


@for_host
def resize(cache: Cache, num_blocks: int) -> Cache:
    """Return the cache with another number of blocks. For the host, outside jit.

    Growing puts the new blocks at the head of the ring: they are taken before any
    cached block. Shrinking drops free blocks, cached ones only when it must, and then
    the oldest first. Live blocks keep their ids if they can; if one lies past the new
    end, all are renumbered as by `compact`, and this counts as a compaction. Old and
    new storage exist side by side until the old cache is let go. Shapes change, so
    what was jitted for the old cache is traced again.

    Args:
      cache: a concrete cache.
      num_blocks: blocks of the new pool, N.

    Returns:
      The cache with the same sequences in a pool of that size.

    Raises:
      ValueError: if there are more live blocks than that, or for a size that
        `CacheConfig` would reject.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, block_size=4, max_sequences=2, max_context_length=16))
      >>> cache, _ = jkv.allocate(cache, [4, 8])
      >>> cache, _ = jkv.free(cache, 0)
      >>> cache = jkv.resize(cache, 2)
      >>> jkv.block_ids(cache, 1).tolist(), int(jkv.num_free_blocks(cache))
      ([0, 1, 2, 2], 0)
    """
    num_blocks = checked_num_blocks(num_blocks, cache.metadata.prefix is not None)
    blocks, num_live = jax.device_get(in_order(cache.metadata))
    if num_live > num_blocks:
        raise ValueError(
            f"{num_live} live blocks do not fit a pool of {num_blocks}; free sequences "
            f"first, or resize to {num_live} blocks or more"
        )
    plan = _plan_resize(
        cache.metadata, blocks[:num_live], blocks[num_live:], num_blocks
    )
    metadata = _resize(cache.metadata, plan)
    moved = {
        name: _gather_pool(pool, plan.source) for name, pool in cache.storage.items()
    }
    resized = cache.with_metadata(metadata).with_storage(moved)
    logger.info(
        "resized a pool from %d to %d blocks (%s to %s), %d live%s, %d cached dropped",
        cache.num_blocks,
        num_blocks,
        human_bytes(cache.nbytes),
        human_bytes(resized.nbytes),
        num_live,
        " and renumbered" if plan.compacts else "",
        plan.num_evicted,
    )
    return resized


class Resizing(NamedTuple):
    """Where the blocks of a pool of another size come from."""

    source: np.ndarray  # i32[N'], old id of each block, N or above for a new one
    free_ids: np.ndarray  # i32[N'], new ids of the free blocks in ring order, then N'
    num_free: np.int32
    compacts: np.bool_  # whether blocks are renumbered
    num_evicted: np.int32  # cached blocks dropped


def _plan_resize(
    metadata: Metadata, live: np.ndarray, free: np.ndarray, num_blocks: int
) -> Resizing:
    """Choose which free blocks stay, and whether live ones must move.

    Args:
      metadata: the state.
      live: i32[...], live blocks in sequence order.
      free: i32[...], free blocks in ring order.
      num_blocks: N' of the new pool, no less than the live blocks.
    """
    num_old, place = metadata.num_blocks, np.arange(num_blocks, dtype=np.int32)
    cached = np.zeros(num_old, bool)
    if metadata.prefix is not None:
        cached = np.asarray(metadata.prefix.hashes) != 0
    # First to go is what is not cached, then the oldest: a stable sort keeps the ring's
    # order among either kind.
    leaving = np.argsort(cached[free], kind="stable")[: max(num_old - num_blocks, 0)]
    kept = np.delete(free, leaving)
    needed = np.concatenate([live, kept[cached[kept]]])
    compacts = bool(np.any(needed >= num_blocks))
    if compacts:
        source = np.concatenate([live, kept])
        ring_order = place[len(live) :]
    else:
        source = place
        ring_order = np.concatenate([place[num_old:], free[free < num_blocks]])
    free_ids = np.full(num_blocks, num_blocks, np.int32)
    free_ids[: len(ring_order)] = ring_order
    return Resizing(
        source,
        free_ids,
        np.int32(len(ring_order)),
        np.bool_(compacts),
        np.int32(np.sum(cached[free[leaving]])),
    )


@jax.jit
def _resize(metadata: Metadata, plan: Resizing) -> Metadata:
    """Return the metadata of a pool of N' blocks."""
    # The peak use stays what it was, as far as the pool is still that large.
    num_old, num_new = metadata.num_blocks, plan.source.shape[0]
    fewest = jnp.maximum(metadata.free_blocks.fewest + (num_new - num_old), 0)
    count = jnp.asarray(plan.num_free)
    free = FreeBlocks(jnp.asarray(plan.free_ids), count, fewest)
    metadata = renumber(metadata, jnp.asarray(plan.source), free)
    if num_new != num_old:
        metadata = reenter(metadata)
    evicted = {Counter.BLOCKS_EVICTED: jnp.asarray(plan.num_evicted)}
    metadata = counters.add(metadata, evicted)
    return count_compaction(metadata, jnp.asarray(plan.compacts))


@jax.jit
def _gather_pool(array: jax.Array, source: jax.Array) -> jax.Array:
    """Return a pool of other blocks, [L, N', ...]; a new one holds zeros."""
    return array.at[:, source].get(mode="fill", fill_value=0)
