"""resize: a pool of another size for the same sequences.

Arrays have new shapes, so this is for the host, between steps. Which blocks stay is
planned in numpy; what names or holds a block then follows as in `compact`.
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

    Growing puts the new blocks at the head of the ring: they are taken before any
    cached block. Shrinking drops free blocks, cached ones only when it must, and then
    the oldest first. Live blocks keep their ids if they can; if one lies past the new
    end, all are renumbered as by `compact`, and this counts as a compaction. Old and
    new storage exist side by side until the old cache is let go. Shapes change, so
    what was jitted for the old cache is traced again.

    With several groups of layers, each pool that stays as large as it is stays as it
    is, its storage too.

    Args:
      cache: a concrete cache.
      num_blocks: blocks of the new pool, N; with several groups of layers one number
        for each that has blocks, and none where all layers have a state.

    Returns:
      The cache with the same sequences in pools of that size.

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
    metadata = cache.metadata
    sizes = _sizes_of_groups(metadata, num_blocks)
    if not sizes:  # all layers have a state, and there is nothing to resize
        return cache
    # All is judged before anything is done.
    orders = {
        number: _order_blocks(metadata, number, size) for number, size in sizes.items()
    }
    compacts = False
    # What the leading group loses is found in no other any more.
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
    """Return the new size of each group's pool, or say what is to be given."""
    num_groups = len(metadata.block_numbers)
    given = list(num_blocks) if np.ndim(num_blocks) else [num_blocks]
    if len(given) != num_groups:
        raise UsageError(
            f"num_blocks must be one number for each of {num_groups} groups of layers, "
            f"got {num_blocks!r}; now they are "
            f"{[group.num_blocks for group in metadata.block_groups]}"
        )
    sizes = [checked_num_blocks(size, metadata.index.is_there) for size in given]
    return dict(zip(metadata.block_numbers, sizes, strict=True))


def _order_blocks(
    metadata: Metadata, number: int, num_blocks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the live blocks of a group in order, if they fit, and the free ones."""
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
    """Return the cache with a pool of another size for one group."""
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
    """Choose which free blocks stay, and whether live ones must move.

    The index finds some of the old blocks, bool[N]. Live ones are in sequence order,
    free ones in ring order, i32[...]; the new pool has room for the live ones. Returned
    are the old id of each block, i32[N'], N or above for a new one; the free blocks;
    and whether blocks are renumbered.
    """
    num_old, new_ids = len(known), np.arange(num_blocks, dtype=np.int32)
    # First to go is what is not cached, then the oldest: a stable sort keeps the ring's
    # order among either kind.
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
    # The peak use stays what it was, as far as the pool is still that large.
    old = metadata.groups[number]
    fewest = old.free_blocks.fewest + (source.shape[0] - old.num_blocks)
    free = free._replace(fewest=jnp.maximum(fewest, 0))
    metadata = renumber(metadata, number, source, free)
    # Only the leading group's blocks stand in hash tables, a row for each of them.
    is_leader = number == metadata.leader
    return metadata.index.reenter(metadata) if is_leader else metadata


_count_compaction = jax.jit(count_compaction)


@jax.jit
def _gather_pool(array: jax.Array, source: jax.Array) -> jax.Array:
    """Return a pool of other blocks, [L, N', ...]; a new one holds zeros."""
    return array.at[:, source].get(mode="fill", fill_value=0)
