"""resize: a pool of another size for the same sequences.

Arrays have new shapes, so this is for the host, between steps. Which blocks stay is
planned in numpy; what names or holds a block then follows as in `compact`.
"""

import dataclasses
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv import counters, prefix_index
from jkv.compaction import count_compaction, in_order, renumber
from jkv.config import checked_num_blocks
from jkv.counters import Counter
from jkv.state import Cache, Metadata
from jkv.units import human_bytes

logger = logging.getLogger(__name__)


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
    moved = {name: _gather(pool, plan.source) for name, pool in cache.storage.items()}
    resized = dataclasses.replace(cache, metadata=metadata).with_storage(moved)
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
    bounds = jnp.stack([jnp.int32(0), count, count, fewest])
    source, free_ids = jnp.asarray(plan.source), jnp.asarray(plan.free_ids)
    metadata = renumber(metadata, source, free_ids, bounds)
    if num_new != num_old:
        metadata = _reenter(metadata)
    evicted = {Counter.BLOCKS_EVICTED: jnp.asarray(plan.num_evicted)}
    metadata = counters.add(metadata, evicted)
    return count_compaction(metadata, jnp.asarray(plan.compacts))


def _reenter(metadata: Metadata) -> Metadata:
    """Enter the indexed blocks in hash tables of as many rows as there are blocks.

    The row of an entry follows from hashes and from the number of rows, so a pool of
    another size needs other tables. A block whose new row is full leaves the index, and
    so does what was built on it.
    """
    if metadata.prefix is None:
        return metadata
    before, num_blocks = metadata.prefix, metadata.num_blocks
    place = jnp.arange(num_blocks, dtype=jnp.int32)
    is_indexed = before.hashes != 0
    empty = dataclasses.replace(
        before,
        buckets=_emptied(before.buckets, num_blocks),
        children=_emptied(before.children, num_blocks),
    )
    metadata, answer = prefix_index.insert(
        dataclasses.replace(metadata, prefix=empty),
        jnp.where(is_indexed, place, num_blocks),
        before.hashes,
        prefix_index.tokens_of(metadata),
        before.salts,
        is_indexed,
    )

    def above(hashes: jax.Array) -> jax.Array:
        """Return the hash that ends where each block begins, u32[N]."""
        root = prefix_index.salt_hash(before.salts)
        parent = hashes.at[before.parents].get(mode="fill", fill_value=0)
        return jnp.where(before.parents < num_blocks, parent, root)

    def is_cut_off(hashes: jax.Array) -> jax.Array:
        has_parent = before.parents < num_blocks
        return (hashes != 0) & has_parent & (above(hashes) == 0)

    # Hardly ever a trip: a row has eight places for one block on average.
    hashes = jax.lax.while_loop(
        lambda hashes: jnp.any(is_cut_off(hashes)),
        lambda hashes: jnp.where(is_cut_off(hashes), jnp.uint32(0), hashes),
        jnp.where(answer == place, before.hashes, jnp.uint32(0)),
    )
    prefix = dataclasses.replace(
        prefix_index.index_of(metadata),
        hashes=hashes,
        committed=_committed(metadata, hashes, before.committed),
    )

    # Only what was listed: a parent may have more children than a row has places.
    listed = jnp.zeros((num_blocks,), bool).at[before.children].set(True, mode="drop")
    listed = jnp.where(listed & (hashes != 0), place, num_blocks)
    prefix = prefix_index.insert_children(prefix, listed, above(hashes))
    lost = is_indexed & (hashes == 0) & (metadata.reference_counts == 0)
    metadata = dataclasses.replace(metadata, prefix=prefix)
    num_lost = jnp.sum(lost, dtype=jnp.int32)
    return counters.add(metadata, {Counter.BLOCKS_EVICTED: num_lost})


def _emptied(table: jax.Array, num_rows: int) -> jax.Array:
    """Return a hash table of so many rows, which names nothing, i32[rows, places]."""
    return jnp.full((num_rows, table.shape[1]), num_rows, jnp.int32)


def _committed(
    metadata: Metadata, hashes: jax.Array, committed: jax.Array
) -> jax.Array:
    """Return what sequences have committed, i32[S], up to the first block not indexed.

    Args:
      metadata: the state.
      hashes: u32[N], 0 for blocks that are not indexed.
      committed: i32[S], tokens as if all of them still were.
    """
    size = jnp.int32(metadata.block_size)
    visible = hashes.at[metadata.block_tables].get(mode="fill", fill_value=0) != 0
    leading = jnp.cumprod(visible, axis=1, dtype=jnp.int32)
    num_visible = jnp.sum(leading, axis=1, dtype=jnp.int32)
    return jnp.where(num_visible < committed // size, num_visible * size, committed)


@jax.jit
def _gather(array: jax.Array, source: jax.Array) -> jax.Array:
    """Return a pool of other blocks, [L, N', ...]; a new one holds zeros."""
    return array.at[:, source].get(mode="fill", fill_value=0)
