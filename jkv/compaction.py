"""compact: live blocks to the front of the pool, and how far apart they lie.

Blocks get new ids by one permutation, and everything that names or holds a block
follows it: tables, reference counts, recorded tokens, prefix index, ring, keys and
values. No result depends on the ids of blocks, so attention gives the same bits.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv import counters, pool, ring
from jkv.counters import Counter
from jkv.state import Cache, Metadata, Ring
from jkv.statistics import num_held_tokens, tally


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
    moved = {name: _permute(pool, source) for name, pool in cache.storage.items()}
    return cache.with_storage(moved)


@jax.jit
def _compact(metadata: Metadata) -> tuple[Metadata, jax.Array]:
    """Return the compacted metadata, and i32[N], the old id of each block."""
    source, num_live = in_order(metadata)
    place = jnp.arange(metadata.num_blocks, dtype=jnp.int32)
    count = metadata.free_blocks.count
    free_ids = jnp.where(place < count, place + num_live, metadata.num_blocks)
    bounds = jnp.stack([jnp.int32(0), count, count, metadata.free_blocks.fewest])
    metadata = renumber(metadata, source, free_ids, bounds)
    return count_compaction(metadata, jnp.bool_(True)), source


@jax.jit
def in_order(metadata: Metadata) -> tuple[jax.Array, jax.Array]:
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


def renumber(
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


def count_compaction(metadata: Metadata, compacts: jax.Array) -> Metadata:
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
