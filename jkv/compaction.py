"""compact and resize: live blocks to the front of the pool, and pools of other sizes.

Blocks get new ids by one permutation, and everything that names or holds a block
follows it: tables, reference counts, recorded tokens, prefix index, ring, keys and
values. No result depends on the ids of blocks, so attention gives the same bits.
"""

import dataclasses
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv import counters, pool, prefix_index, ring
from jkv.config import checked_num_blocks
from jkv.counters import Counter
from jkv.state import Cache, Metadata, Ring
from jkv.statistics import num_held_tokens, tally
from jkv.units import human_bytes

logger = logging.getLogger(__name__)


class Fragmentation(NamedTuple):
    """Three answers to "how much of the pool is wasted", by `fragmentation`."""

    internal: float  # slots of live blocks that hold no token, over all their slots
    sharing: float  # table entries over live blocks; 1.0 if nothing is shared
    spread: float  # free blocks below the highest live one, over all blocks up to it


def fragmentation(cache: Cache) -> Fragmentation:
    """Say how well the pool's blocks are used. For the host, outside jit.

    No part of a paged pool is too scattered to be handed out, so a high number is no
    refusal to come, and an empty pool has none: (0.0, 1.0, 0.0).

    * `internal` is what blocks larger than a token, and reservations, cost: empty slots
      of live blocks. `compact` cannot lower it.
    * `sharing` is what `fork` and the prefix index save: 2.0 means that the sequences
      would need twice the blocks if each had its own.
    * `spread` tells how far live blocks lie apart: the share of holes in the stretch of
      the pool that they span from block 0 on. `compact` makes it 0.

    Example, blocks of 4 tokens. Sequence 0 had block 0 and is freed; 1 has 6 tokens in
    blocks 1 and 2; its fork shares block 1 and has its 2 last tokens in block 3. Of the
    12 slots of the live blocks 1, 2 and 3, 4 are empty; they have 4 table entries; one
    of the blocks 0 to 3 is free:

      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=4, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0, 0])
      >>> cache, _ = jkv.append(cache, [0, 1], [4, 6], capacity=10)
      >>> cache, _ = jkv.fork(cache, 1)
      >>> cache, _ = jkv.free(cache, 0)
      >>> [round(number, 3) for number in jkv.fragmentation(cache)]
      [0.333, 1.333, 0.25]
    """
    sums = tally(cache)
    live = sums.live_blocks
    if not live:
        return Fragmentation(0.0, 1.0, 0.0)
    cells = live * cache.block_size
    return Fragmentation(
        internal=1 - num_held_tokens(cache, sums) / cells,
        sharing=sums.mapped_blocks / live,
        spread=1 - live / sums.extent,
    )


def should_compact(cache: Cache, threshold: float = 0.3) -> bool:
    """Return whether `fragmentation(cache).spread`, all that `compact` cures, is above.

    Args:
      cache: a concrete cache.
      threshold: 0 to 1.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, block_size=4, max_sequences=2, max_context_length=16))
      >>> cache, _ = jkv.allocate(cache, [12, 4])
      >>> cache, _ = jkv.free(cache, 0)
      >>> jkv.should_compact(cache), jkv.should_compact(cache, threshold=0.8)
      (True, False)
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must lie in 0..1, got {threshold}")
    return fragmentation(cache).spread > threshold


def compact(cache: Cache) -> Cache:
    """Move live blocks to the front in sequence order, the free ones behind them.

    Live blocks are numbered as the block tables first mention them, row by row, so that
    a sequence that shares nothing has consecutive blocks. Free blocks follow in the
    order of the ring, which ascends afterwards and hands them out in the same order as
    before, cached blocks included. Pure, and fit for jit: donate the cache, and the
    storage is permuted in place with one layer as scratch. A pool that is in order
    already is not touched.

    A `Batch` holds block ids: `write` and `commit` what you `append` before compacting.

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
    cache = dataclasses.replace(cache, metadata=metadata)
    if cache.num_layers == 0:
        return cache
    keys, values = _permute(cache.keys, source), _permute(cache.values, source)
    return dataclasses.replace(cache, keys=keys, values=values)


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
    blocks, num_live = jax.device_get(_in_order(cache.metadata))
    if num_live > num_blocks:
        raise ValueError(
            f"{num_live} live blocks do not fit a pool of {num_blocks}; free sequences "
            f"first, or resize to {num_live} blocks or more"
        )
    plan = _plan_resize(
        cache.metadata, blocks[:num_live], blocks[num_live:], num_blocks
    )
    metadata = _resize(cache.metadata, plan)
    keys, values = _gather(cache.keys, plan.source), _gather(cache.values, plan.source)
    resized = dataclasses.replace(cache, metadata=metadata, keys=keys, values=values)
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
def _compact(metadata: Metadata) -> tuple[Metadata, jax.Array]:
    """Return the compacted metadata, and i32[N], the old id of each block."""
    source, num_live = _in_order(metadata)
    place = jnp.arange(metadata.num_blocks, dtype=jnp.int32)
    count = metadata.free_blocks.count
    free_ids = jnp.where(place < count, place + num_live, metadata.num_blocks)
    bounds = jnp.stack([jnp.int32(0), count, count, metadata.free_blocks.fewest])
    metadata = _renumber(metadata, source, free_ids, bounds)
    return _count_compaction(metadata, jnp.bool_(True)), source


@jax.jit
def _resize(metadata: Metadata, plan: Resizing) -> Metadata:
    """Return the metadata of a pool of N' blocks."""
    # The peak use stays what it was, as far as the pool is still that large.
    num_old, num_new = metadata.num_blocks, plan.source.shape[0]
    fewest = jnp.maximum(metadata.free_blocks.fewest + (num_new - num_old), 0)
    count = jnp.asarray(plan.num_free)
    bounds = jnp.stack([jnp.int32(0), count, count, fewest])
    source, free_ids = jnp.asarray(plan.source), jnp.asarray(plan.free_ids)
    metadata = _renumber(metadata, source, free_ids, bounds)
    if num_new != num_old:
        metadata = _reenter(metadata)
    evicted = {Counter.BLOCKS_EVICTED: jnp.asarray(plan.num_evicted)}
    metadata = counters.add(metadata, evicted)
    return _count_compaction(metadata, jnp.asarray(plan.compacts))


@jax.jit
def _in_order(metadata: Metadata) -> tuple[jax.Array, jax.Array]:
    """Return the blocks in the order that `compact` gives them, i32[N], and i32[].

    Live blocks come by their first mention in the tables, then the free ones from the
    head of the ring on. The second result is the number of live ones.
    """
    num_blocks = metadata.num_blocks
    entries = metadata.block_tables.reshape(-1)
    place = jnp.arange(entries.shape[0], dtype=jnp.int32)
    first = jnp.full((num_blocks,), entries.shape[0], jnp.int32)
    first = first.at[entries].min(place, mode="drop")
    is_first = first.at[entries].get(mode="fill", fill_value=-1) == place
    blocks = jnp.zeros((num_blocks,), jnp.int32)
    blocks, num_live = _extend(blocks, jnp.int32(0), entries, is_first)

    free = metadata.free_blocks
    place = jnp.arange(free.ids.shape[0], dtype=jnp.int32)
    if metadata.prefix is None:
        ids, is_free = ring.peek(free, place), place < free.span
    else:
        ids, is_free = pool.entries(free, metadata.prefix, place)
    return _extend(blocks, num_live, ids, is_free)[0], num_live


def _extend(
    blocks: jax.Array, count: jax.Array, ids: jax.Array, chosen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Put the chosen ids, in order, behind the first `count` of the blocks."""
    ranks = count + ring.running_sum(chosen.astype(jnp.int32))
    index = jnp.where(chosen, ranks - 1, blocks.shape[0])
    return blocks.at[index].set(ids, mode="drop"), ranks[-1]


def _renumber(
    metadata: Metadata, source: jax.Array, free_ids: jax.Array, bounds: jax.Array
) -> Metadata:
    """Give the blocks new ids, wherever one is named or described.

    Args:
      metadata: the state of N blocks.
      source: i32[N'], old id of each block, all different; N or above for a new one.
      free_ids: i32[N'], new ids in ring order, then N'.
      bounds: i32[4], of the new ring.
    """
    num_old, num_new = metadata.num_blocks, source.shape[0]
    place = jnp.arange(num_new, dtype=jnp.int32)
    target = jnp.full((num_old,), num_new, jnp.int32)
    target = target.at[source].set(place, mode="drop", unique_indices=True)

    def renamed(ids: jax.Array) -> jax.Array:
        return target.at[ids].get(mode="fill", fill_value=num_new)

    def moved(rows: jax.Array, fill: int) -> jax.Array:
        return rows.at[source].get(mode="fill", fill_value=fill)

    prefix, room = metadata.prefix, num_new
    if prefix is not None:
        room *= 2
        positions = jnp.full((num_new,), -1, jnp.int32)
        positions = positions.at[free_ids].set(place, mode="drop")
        prefix = dataclasses.replace(
            prefix,
            # Rows follow from hashes, not from ids: what they name is renamed in place.
            buckets=renamed(prefix.buckets),
            children=renamed(prefix.children),
            hashes=moved(prefix.hashes, 0),
            parents=renamed(moved(prefix.parents, num_old)),
            salts=moved(prefix.salts, 0),
            positions=positions,
        )
    tokens = metadata.tokens
    return dataclasses.replace(
        metadata,
        block_tables=renamed(metadata.block_tables),
        reference_counts=moved(metadata.reference_counts, 0),
        free_blocks=Ring(
            ids=jnp.pad(free_ids, (0, room - num_new), constant_values=num_new),
            bounds=bounds,
        ),
        tokens=None if tokens is None else moved(tokens, -1),
        prefix=prefix,
    )


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
    empty = dataclasses.replace(
        before,
        buckets=jnp.full((num_blocks, before.buckets.shape[1]), num_blocks, jnp.int32),
        children=jnp.full(
            (num_blocks, before.children.shape[1]), num_blocks, jnp.int32
        ),
    )
    is_indexed = before.hashes != 0
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

    # Hardly ever a trip: a row has eight places for one block on average.
    def is_cut(hashes: jax.Array) -> jax.Array:
        return (hashes != 0) & (above(hashes) == 0) & (before.parents < num_blocks)

    hashes = jax.lax.while_loop(
        lambda hashes: jnp.any(is_cut(hashes)),
        lambda hashes: jnp.where(is_cut(hashes), jnp.uint32(0), hashes),
        jnp.where(answer == place, before.hashes, jnp.uint32(0)),
    )
    prefix = dataclasses.replace(prefix_index.index_of(metadata), hashes=hashes)

    # Only what was listed: a parent may have more children than a row has places.
    listed = jnp.zeros((num_blocks,), bool).at[before.children].set(True, mode="drop")
    listed = jnp.where(listed & (hashes != 0), place, num_blocks)
    prefix = prefix_index.insert_children(prefix, listed, above(hashes))

    # A sequence whose blocks have left the index has committed no more than the rest.
    size = jnp.int32(metadata.block_size)
    visible = hashes.at[metadata.block_tables].get(mode="fill", fill_value=0) != 0
    num_visible = jnp.sum(jnp.cumprod(visible, axis=1, dtype=jnp.int32), axis=1)
    num_visible = num_visible.astype(jnp.int32)
    cut = num_visible < before.committed // size
    committed = jnp.where(cut, num_visible * size, before.committed)
    prefix = dataclasses.replace(prefix, committed=committed)
    lost = is_indexed & (hashes == 0) & (metadata.reference_counts == 0)
    num_lost = jnp.sum(lost, dtype=jnp.int32)
    metadata = dataclasses.replace(metadata, prefix=prefix)
    return counters.add(metadata, {Counter.BLOCKS_EVICTED: num_lost})


def _count_compaction(metadata: Metadata, compacts: jax.Array) -> Metadata:
    """Count a compaction, if it is one, and note the clock."""
    metadata = counters.add(metadata, {Counter.COMPACTIONS: compacts})
    rows = metadata.counters
    last = jnp.where(compacts, rows[Counter.CLOCK], rows[Counter.LAST_COMPACTION])
    rows = rows.at[int(Counter.LAST_COMPACTION)].set(last)
    return dataclasses.replace(metadata, counters=rows)


@jax.jit
def _permute(array: jax.Array, source: jax.Array) -> jax.Array:
    """Move blocks, [L, N, ...], in place: layer by layer, a layer's copy at a time."""

    def permute_layer(layer: jax.Array, array: jax.Array) -> jax.Array:
        return array.at[layer].set(array.at[layer, source].get(mode="clip"))

    # No trip where every block is in its place.
    in_order = jnp.all(source == jnp.arange(source.shape[0], dtype=jnp.int32))
    trips = jnp.where(in_order, jnp.int32(0), jnp.int32(array.shape[0]))
    return jax.lax.fori_loop(jnp.int32(0), trips, permute_layer, array)


@jax.jit
def _gather(array: jax.Array, source: jax.Array) -> jax.Array:
    """Return a pool of other blocks, [L, N', ...]; a new one holds zeros."""
    return array.at[:, source].get(mode="fill", fill_value=0)
