"""Holes in the ring of free blocks, where cached blocks came back to life.

A free block that the index finds is revived: it gets an owner and leaves the middle of
the ring, where a hole remains. `positions` tells an entry from a hole. Before blocks
are taken, the entries in front are moved together. Each hole is moved past once, so the
work stays constant per block in the long run.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import counters, mentions, ring
from jkv.metadata.prefixes.prefix_index import if_indexed, index_of
from jkv.metadata.xla_cpu import running_sum, stage, written_after
from jkv.sharding.loops import while_loop
from jkv.state import Metadata, PrefixIndex, Ring
from jkv.status import Counter

# Entries of the ring looked at per trip of a loop.
_CHUNK = 512


@if_indexed
def expose(metadata: Metadata, num: jax.Array) -> Metadata:
    """Rid the first `num` free blocks, i32[], of holes between them.

    Without an index there are none. With one this comes before any `peek` or `pop` on
    the ring of free blocks.
    """
    free, prefix = metadata.free_blocks, index_of(metadata)
    # No hole in the whole ring: nothing to look for.
    num = jnp.where(free.span == free.count, 0, num)
    free, prefix = _squeeze(free, prefix, _reach(free, prefix, num))
    return dataclasses.replace(metadata, free_blocks=free, prefix=prefix)


class Revivals(NamedTuple):
    """What it takes to share cached blocks with B requests."""

    costs: jax.Array  # i32[B], free blocks that the request is the first to name
    wants: jax.Array  # bool[B], whether it names a free block at all


def find_revivals(metadata: Metadata, blocks: jax.Array) -> Revivals:
    """Count the free blocks that requests would bring back to life.

    Args:
      metadata: the state before the call.
      blocks: i32[B, C], blocks found for each request, N for none.
    """
    if blocks.size == 0:
        none = jnp.zeros(blocks.shape[:1], jnp.int32)
        return Revivals(none, none > 0)
    counts = metadata.reference_counts.at[blocks].get(mode="fill", fill_value=1)
    is_free = counts == 0
    is_first = mentions.is_first(blocks.reshape(-1), metadata.num_blocks)
    costs = jnp.sum(is_free & is_first.reshape(blocks.shape), axis=1, dtype=jnp.int32)
    return Revivals(costs, jnp.any(is_free, axis=1))


@if_indexed
def add_references(metadata: Metadata, block: jax.Array) -> Metadata:
    """Give one more reference to each indexed block named, i32[P]; N is dropped.

    A cached block is revived: it leaves the ring, where a hole remains.
    """
    free, prefix = metadata.free_blocks, index_of(metadata)
    num_blocks = metadata.num_blocks
    # The first lane of several that name a free block takes it from the ring.
    counts = metadata.reference_counts
    owners = counts.at[block].get(mode="fill", fill_value=1)
    named = jnp.where(owners == 0, block, num_blocks)
    counts, revived = mentions.find_one(counts, named, last=False)
    num = jnp.sum(revived, dtype=jnp.int32)
    count = free.count - num
    free = Ring.of(
        free.ids,
        head=free.head,
        span=free.span,
        count=count,
        fewest=jnp.minimum(free.fewest, count),
    )
    gone = jnp.where(revived, block, num_blocks)
    prefix = dataclasses.replace(
        prefix, positions=prefix.positions.at[gone].set(-1, mode="drop")
    )
    # The ring has room for N holes beside N blocks; more than that are squeezed out.
    full = free.span - free.count > num_blocks
    end = _reach(free, prefix, jnp.where(full, free.count, 0))
    free, prefix = _squeeze(free, prefix, end)
    gains = written_after(owners >= 0, block, num_blocks)
    metadata = dataclasses.replace(
        metadata,
        reference_counts=counts.at[gains].add(1, mode="drop"),
        free_blocks=free,
        prefix=prefix,
    )
    return counters.add(metadata, {Counter.BLOCKS_TAKEN: num})


def entries(metadata: Metadata, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the free blocks at distances from the head of the ring.

    Args:
      metadata: the state.
      index: i32[P].

    Returns:
      i32[P], and bool[P]: which of them are entries, not holes and not past the tail.
    """
    free = metadata.free_blocks
    if metadata.prefix is None:
        return ring.peek(free, index), index < free.span
    return _entries(free, metadata.prefix.positions, index)


def _entries(
    free: Ring, positions: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    place = ring.wrap(free, free.head + index)
    block = free.ids.at[place].get(mode="clip")
    inside = (index >= 0) & (index < free.span)
    return block, inside & (positions.at[block].get(mode="clip") == place)


def _reach(free: Ring, prefix: PrefixIndex, num: jax.Array) -> jax.Array:
    """Return how far from the head `num` entries reach, in whole chunks, i32[]."""
    return while_loop(
        lambda state: state[1] < num,
        lambda state: _count_chunk(free, prefix.positions, *state),
        (jnp.int32(0), jnp.int32(0)),
    )[0]


@stage
def _count_chunk(
    free: Ring, positions: jax.Array, end: jax.Array, found: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Count the entries of one chunk; return where it ends, and how many there are."""
    lanes = jnp.arange(_CHUNK, dtype=jnp.int32)
    more = jnp.sum(_entries(free, positions, end + lanes)[1], dtype=jnp.int32)
    return jnp.minimum(end + _CHUNK, free.span), found + more


def _squeeze(
    free: Ring, prefix: PrefixIndex, end: jax.Array
) -> tuple[Ring, PrefixIndex]:
    """Move the entries before `end` together, up to `end`; the head follows."""
    # From the end towards the head: an entry only moves to places already read.
    free, positions, _, start = while_loop(
        lambda state: state[2] > 0,
        lambda state: _squeeze_chunk(*state),
        (free, prefix.positions, end, end),
    )
    free = Ring.of(
        free.ids,
        head=ring.wrap(free, free.head + start),
        span=free.span - start,
        count=free.count,
        fewest=free.fewest,
    )
    return free, dataclasses.replace(prefix, positions=positions)


@stage
def _squeeze_chunk(
    free: Ring, positions: jax.Array, read_to: jax.Array, write_to: jax.Array
) -> tuple[Ring, jax.Array, jax.Array, jax.Array]:
    """Move the entries of the chunk that ends at `read_to`, up to `write_to`."""
    index = read_to - _CHUNK + jnp.arange(_CHUNK, dtype=jnp.int32)
    block, entry = _entries(free, positions, index)
    rank = running_sum(entry.astype(jnp.int32))
    target = ring.wrap(free, free.head + write_to - rank[-1] + rank - 1)
    ids = free.ids.at[jnp.where(entry, target, free.ids.shape[0])]
    moved = jnp.where(entry, block, positions.shape[0])
    return (
        dataclasses.replace(free, ids=ids.set(block, mode="drop")),
        positions.at[moved].set(target, mode="drop"),
        read_to - _CHUNK,
        write_to - rank[-1],
    )
