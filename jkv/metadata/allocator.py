"""The pool of blocks: handed out from the head of a ring, taken back at its tail.

A block with reference count 0 is free and stands in the ring, so the ring's order is
the order in which blocks were last used. With a prefix index a free block may be found
and revived; it then leaves a hole in the middle of the ring. `positions` tells a hole
from an entry, `expose` moves the holes away from the entries about to be taken. Each
hole is moved past once, so the work stays constant per block in the long run.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.metadata import counters, ring
from jkv.metadata.xla_cpu import running_sum
from jkv.state import Metadata, PrefixIndex, Ring
from jkv.status import Counter

# Entries of the ring looked at per trip of a loop.
_CHUNK = 512


def expose(metadata: Metadata, num: jax.Array) -> Metadata:
    """Rid the first `num` free blocks (i32[]) of holes between them.

    Without a prefix index there are none. With one this must come before `peek` and
    `pop` on the ring of free blocks.
    """
    prefix, free = metadata.prefix, metadata.free_blocks
    if prefix is None:
        return metadata
    # No hole in the whole ring: nothing to look for.
    num = jnp.where(free.span == free.count, 0, num)
    free, prefix = _squeeze(free, prefix, _reach(free, prefix, num))
    return dataclasses.replace(metadata, free_blocks=free, prefix=prefix)


def mark_taken(metadata: Metadata, block: jax.Array) -> Metadata:
    """Give blocks, i32[P], one reference each and forget their contents.

    Blocks of N are dropped. The caller pops them from the ring.
    """
    counts = metadata.reference_counts.at[block].set(1, mode="drop")
    metadata = dataclasses.replace(metadata, reference_counts=counts)
    prefix = metadata.prefix
    if prefix is None:
        return metadata
    was_indexed = prefix.hashes.at[block].get(mode="fill", fill_value=0) != 0
    num = jnp.sum(was_indexed, dtype=jnp.int32)
    metadata = counters.add(metadata, {Counter.BLOCKS_EVICTED: num})
    # The write depends on the read, or XLA would keep a copy of the array for it.
    indexed = jnp.where(was_indexed, block, metadata.num_blocks)
    prefix = dataclasses.replace(
        prefix,
        hashes=prefix.hashes.at[indexed].set(jnp.uint32(0), mode="drop"),
        positions=prefix.positions.at[block].set(-1, mode="drop"),
    )
    return dataclasses.replace(metadata, prefix=prefix)


def drop_references(metadata: Metadata, block: jax.Array) -> Metadata:
    """Take one reference from each block named, i32[P]; N is dropped.

    A block without any left enters the ring, at the turn of its last mention.
    """
    num_blocks = metadata.num_blocks
    counts = metadata.reference_counts.at[block].add(-1, mode="drop")
    dropped = counts.at[block].get(mode="fill", fill_value=1) == 0

    # Several lanes may have brought one block to zero: the last of them returns it.
    lane = jnp.arange(block.shape[0], dtype=jnp.int32)
    zeroed = jnp.where(dropped, block, num_blocks)
    returns, counts = _is_lowest(counts, zeroed, -1 - lane)
    metadata = dataclasses.replace(metadata, reference_counts=counts)
    prefix, free = metadata.prefix, metadata.free_blocks
    if prefix is not None:
        place, _ = ring.places(free, returns)
        returned = jnp.where(returns, block, num_blocks)
        positions = prefix.positions.at[returned].set(place, mode="drop")
        prefix = dataclasses.replace(prefix, positions=positions)
    free = ring.push(free, block, returns)
    return dataclasses.replace(metadata, free_blocks=free, prefix=prefix)


def first_revivals(metadata: Metadata, block: jax.Array) -> tuple[Metadata, jax.Array]:
    """Return which lanes, bool[P], are the first to name a free block; N is none.

    The metadata returned is the same, to be used in place of the old one.
    """
    counts = metadata.reference_counts
    is_free = counts.at[block].get(mode="fill", fill_value=1) == 0
    lane = jnp.arange(block.shape[0], dtype=jnp.int32) - block.shape[0]
    free = jnp.where(is_free, block, metadata.num_blocks)
    first, counts = _is_lowest(counts, free, lane)
    return dataclasses.replace(metadata, reference_counts=counts), first


def add_references(metadata: Metadata, block: jax.Array) -> Metadata:
    """Give one more reference to each indexed block named, i32[P]; N is dropped.

    A cached block is revived: it leaves the ring, where a hole remains.
    """
    metadata, revived = first_revivals(metadata, block)
    prefix, free = metadata.prefix, metadata.free_blocks
    assert prefix is not None, "only an index finds blocks to revive"
    num = jnp.sum(revived, dtype=jnp.int32)
    metadata = counters.add(metadata, {Counter.BLOCKS_TAKEN: num})
    count = free.count - num
    fewest = jnp.minimum(free.fewest, count)
    free = dataclasses.replace(
        free, bounds=jnp.stack([free.head, free.span, count, fewest])
    )
    gone = jnp.where(revived, block, metadata.num_blocks)
    prefix = dataclasses.replace(
        prefix, positions=prefix.positions.at[gone].set(-1, mode="drop")
    )
    # The ring has room for N holes beside N blocks; more than that are squeezed out.
    full = free.span - free.count > metadata.num_blocks
    end = _reach(free, prefix, jnp.where(full, free.count, 0))
    free, prefix = _squeeze(free, prefix, end)
    return dataclasses.replace(
        metadata,
        reference_counts=metadata.reference_counts.at[block].add(1, mode="drop"),
        free_blocks=free,
        prefix=prefix,
    )


def entries(
    free: Ring, prefix: PrefixIndex, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the blocks at distances from the head, i32[P], and which are no holes."""
    place = ring.wrap(free, free.head + index)
    block = free.ids.at[place].get(mode="clip")
    inside = (index >= 0) & (index < free.span)
    return block, inside & (prefix.positions.at[block].get(mode="clip") == place)


def _is_lowest(
    counts: jax.Array, block: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return which lane has the lowest key of those that name the same block, bool[P].

    The zero counts of the blocks themselves serve as scratch (a scratch array of their
    own would cost a pass over the pool); the counts come back with zeros there.

    Args:
      counts: i32[N], 0 at all blocks named.
      block: i32[P], N for none.
      key: i32[P], below 0, distinct.
    """
    num_blocks = counts.shape[0]
    scratch = counts.at[block].min(key, mode="drop")
    lowest = scratch.at[block].get(mode="fill", fill_value=0) == key
    lowest &= block < num_blocks
    # The write depends on the read, or XLA would keep a copy of the array for it.
    return lowest, scratch.at[jnp.where(lowest, block, num_blocks)].set(0, mode="drop")


def _reach(free: Ring, prefix: PrefixIndex, num: jax.Array) -> jax.Array:
    """Return how far from the head `num` entries reach, in whole chunks, i32[]."""
    lanes = jnp.arange(_CHUNK, dtype=jnp.int32)

    def chunk(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        end, found = state
        more = jnp.sum(entries(free, prefix, end + lanes)[1], dtype=jnp.int32)
        return jnp.minimum(end + _CHUNK, free.span), found + more

    return jax.lax.while_loop(
        lambda state: state[1] < num, chunk, (jnp.int32(0), jnp.int32(0))
    )[0]


def _squeeze(
    free: Ring, prefix: PrefixIndex, end: jax.Array
) -> tuple[Ring, PrefixIndex]:
    """Move the entries before `end` together, up to `end`; the head follows."""
    lanes = jnp.arange(_CHUNK, dtype=jnp.int32)
    capacity = free.ids.shape[0]
    num_blocks = prefix.positions.shape[0]
    Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

    # From the end towards the head: an entry only moves to places already read.
    def chunk(state: Carry) -> Carry:
        ids, positions, read_to, write_to = state
        index = read_to - _CHUNK + lanes
        block, entry = entries(
            dataclasses.replace(free, ids=ids),
            dataclasses.replace(prefix, positions=positions),
            index,
        )
        rank = running_sum(entry.astype(jnp.int32))
        target = ring.wrap(free, free.head + write_to - rank[-1] + rank - 1)
        ids = ids.at[jnp.where(entry, target, capacity)].set(block, mode="drop")
        moved = jnp.where(entry, block, num_blocks)
        positions = positions.at[moved].set(target, mode="drop")
        return ids, positions, read_to - _CHUNK, write_to - rank[-1]

    ids, positions, _, start = jax.lax.while_loop(
        lambda state: state[2] > 0, chunk, (free.ids, prefix.positions, end, end)
    )
    head = ring.wrap(free, free.head + start)
    bounds = jnp.stack([head, free.span - start, free.count, free.fewest])
    return (
        dataclasses.replace(free, ids=ids, bounds=bounds),
        dataclasses.replace(prefix, positions=positions),
    )
