"""resize: change the number of blocks of a cache.

Array shapes change, so this runs on the host, between steps. numpy plans which blocks
stay; tables and storage follow as in `compact`.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.blocks.renumbering import FreeBlocks, count_compaction, in_order, renumber
from jkv.config.counts import checked_num_blocks, human_bytes
from jkv.state import Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.status import UsageError

logger = logging.getLogger("jkv.resizing")


@takes_cache(on_host=True)
def resize(cache: Cache, num_blocks: int | Sequence[int]) -> Cache:
    """Return the cache with another number of blocks. For the host, outside jit.

    When growing, new blocks enter at the head of the ring and are taken before any
    cached block. When shrinking, free blocks are dropped, cached ones last and in LRU
    order. Live blocks keep their ids if possible; if one lies beyond the new end, all
    are renumbered as by `compact`, which counts as a compaction. Old and new storage
    coexist until the old cache is deleted. Functions jitted for the old shapes are
    traced again.

    With several groups of layers, a pool of unchanged size keeps its storage.

    Args:
      cache: a concrete cache.
      num_blocks: new number of blocks, N; with several groups of layers one number for
        each that has blocks; an empty sequence if all layers have a recurrent state.

    Returns:
      The cache with the same sequences and the new pool sizes.

    Raises:
      ValueError: if the live blocks do not fit, or `CacheConfig` would refuse the size.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> cache, _ = jkv.allocate(cache, [4, 8])
      >>> cache, _ = jkv.free(cache, 0)
      >>> cache = jkv.resize(cache, 2)
      >>> jkv.block_ids(cache, 1).tolist(), int(jkv.num_free_blocks(cache))
      ([0, 1, 2, 2], 0)
    """
    metadata = cache.metadata
    sizes = _sizes_of_groups(metadata, num_blocks)
    if not sizes:  # only recurrent-state layers
        return cache
    # Check all groups before changing any.
    orders = {
        number: _order_blocks(metadata, number, size) for number, size in sizes.items()
    }
    compacts = False
    # The leader first: blocks evicted there leave the index in all groups.
    for number in (metadata.leader, *metadata.followers):
        if sizes[number] != metadata.groups[number].num_blocks:
            block = jnp.arange(metadata.groups[number].num_blocks, dtype=jnp.int32)
            known = cache.metadata.index.knows(cache.metadata, number, block)
            plan = _plan_resize(np.asarray(known), *orders[number], sizes[number])
            cache = _apply(cache, number, *plan)
            compacts |= plan[-1]
    if not compacts:
        return cache
    return cache.with_metadata(_count_compaction(cache.metadata))


def _sizes_of_groups(metadata: Metadata, num_blocks: Any) -> dict[int, int]:
    """Return the new size of each group's pool; refuse a wrong number of sizes."""
    num_groups = len(metadata.block_numbers)
    given = list(num_blocks) if np.ndim(num_blocks) else [num_blocks]
    if len(given) != num_groups:
        raise UsageError(
            f"num_blocks must be one number for each of {num_groups} groups of layers, "
            f"got {num_blocks!r}; the current sizes are "
            f"{[group.num_blocks for group in metadata.block_groups]}"
        )
    sizes = [checked_num_blocks(size, metadata.index.is_there) for size in given]
    return dict(zip(metadata.block_numbers, sizes, strict=True))


def _order_blocks(
    metadata: Metadata, number: int, num_blocks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return a group's live blocks in order and its free blocks; refuse misfits."""
    blocks, num_live = jax.device_get(in_order(metadata.groups[number]))
    if num_live > num_blocks:
        where = f" of group {number}" if len(metadata.block_numbers) > 1 else ""
        raise ValueError(
            f"{num_live} live blocks{where} do not fit a pool of {num_blocks}; free "
            f"sequences first, or resize to {num_live} blocks or more"
        )
    return blocks[:num_live], blocks[num_live:]


def _apply(
    cache: Cache, number: int, source: np.ndarray, free: FreeBlocks, compacts: bool
) -> Cache:
    """Return the cache with one group's pool resized."""
    storage = cache.storage[number]
    moved = {name: _gather_pool(pool, source) for name, pool in storage.arrays.items()}
    resized = cache.with_metadata(_resize(cache.metadata, number, source, free))
    resized = resized.with_group_storage(number, storage.with_arrays(moved))
    logger.info(
        "resized a pool from %d to %d blocks (%s to %s), %d live%s, %d cached dropped",
        cache.metadata.groups[number].num_blocks,
        len(source),
        human_bytes(cache.nbytes),
        human_bytes(resized.nbytes),
        len(source) - int(free.num),
        " and renumbered" if compacts else "",
        free.forgotten,
    )
    return resized


def _plan_resize(
    known: np.ndarray, live: np.ndarray, free: np.ndarray, num_blocks: int
) -> tuple[np.ndarray, FreeBlocks, bool]:
    """Choose the free blocks to keep, and whether live blocks must move.

    `known`, bool[N], marks indexed blocks. Live blocks are in sequence order, free ones
    in ring order, i32[...]; the live blocks fit. Return the old id of each block,
    i32[N'], N or above for new ones; the free blocks; and True if blocks are
    renumbered.
    """
    num_old, new_ids = len(known), np.arange(num_blocks, dtype=np.int32)
    # Blocks without an index entry leave first; the stable sort keeps LRU order within
    # each kind.
    leaving = np.argsort(known[free], kind="stable")[: max(num_old - num_blocks, 0)]
    kept = np.delete(free, leaving)
    needed = np.concatenate([live, kept[known[kept]]])
    compacts = bool(np.any(needed >= num_blocks))
    if compacts:
        source = np.concatenate([live, kept])
        ring_order = new_ids[len(live) :]
    else:
        source = new_ids
        ring_order = np.concatenate([new_ids[num_old:], free[free < num_blocks]])
    free_ids = np.full(num_blocks, num_blocks, np.int32)
    free_ids[: len(ring_order)] = ring_order
    num_evicted = np.int32(np.sum(known[free[leaving]]))
    return (
        source,
        FreeBlocks(free_ids, np.int32(len(ring_order)), None, num_evicted),
        compacts,
    )


@functools.partial(jax.jit, static_argnums=1)
def _resize(
    metadata: Metadata, number: int, source: jax.Array, free: FreeBlocks
) -> Metadata:
    """Return the metadata with a pool of N' blocks for one group."""
    # The peak use is kept, up to the size of the new pool.
    old = metadata.groups[number]
    fewest = old.free_blocks.fewest + (source.shape[0] - old.num_blocks)
    free = free._replace(fewest=jnp.maximum(fewest, 0))
    metadata = renumber(metadata, number, source, free)
    # The hash tables have one row per block of the leading group only.
    is_leader = number == metadata.leader
    return metadata.index.reenter(metadata) if is_leader else metadata


_count_compaction = jax.jit(count_compaction)


@jax.jit
def _gather_pool(array: jax.Array, source: jax.Array) -> jax.Array:
    """Return the pool with blocks [L, N', ...] from `source`; new ones are zero."""
    return array.at[:, source].get(mode="fill", fill_value=0)
