"""The block allocator: blocks leave at the head of a ring and return at its tail.

A block with reference count 0 is free and stands in its group's ring, in LRU order.
With a prefix index, a prefix cache hit revives a free block from the middle of the
ring.

Only this module touches the ring, its holes and its counters. `grant` takes blocks and
writes them to table cells. A loop that writes them in several trips calls `take` once
before the loop, and `enter` in each trip.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata import ring
from jkv.operations import (
    find_one,
    gather,
    is_first,
    scatter,
    scatter_add,
    stage,
    written_after,
)
from jkv.state import BlockGroup, Metadata


def take(
    metadata: Metadata, number: int, num: jax.Array, most: int
) -> tuple[Metadata, ring.Leaving]:
    """Take `num` blocks, i32[], of a group, at most `most`; return them as well."""
    free, taken = ring.take(metadata.groups[number].free_blocks, num, most)
    return metadata.changed(number, free_blocks=free), taken


def enter(
    metadata: Metadata, number: int, row: jax.Array, column: jax.Array, block: jax.Array
) -> Metadata:
    """Write distinct taken blocks, i32[P], to cells and evict their cached contents."""
    group = metadata.groups[number]
    block = jnp.where(row < group.max_sequences, block, group.num_blocks)
    # The ring stays outside: XLA copies a stage's argument that is modified elsewhere.
    tables, counts = _enter(
        group.block_tables, group.reference_counts, row, column, block
    )
    metadata = metadata.changed(number, block_tables=tables, reference_counts=counts)
    return forget_taken(metadata, number, block)


@stage
def _enter(
    tables: jax.Array,
    counts: jax.Array,
    row: jax.Array,
    column: jax.Array,
    block: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Write blocks to cells, with a reference count of 1; N is dropped."""
    return (
        scatter(tables, (row, column), block),
        scatter(counts, block, 1),
    )


def forget_taken(metadata: Metadata, number: int, block: jax.Array) -> Metadata:
    """Remove taken blocks of a group, i32[P], from the index; N is dropped."""
    metadata, num_forgotten = metadata.index.forget(metadata, number, block)
    free = ring.forget(metadata.groups[number].free_blocks, block, num_forgotten)
    return metadata.changed(number, free_blocks=free)


def count_forgotten(metadata: Metadata, number: int, num: jax.Array) -> Metadata:
    """Add `num`, i32[], to the number of evicted blocks of a group."""
    free = metadata.groups[number].free_blocks.added(num, forgotten=1)
    return metadata.changed(number, free_blocks=free)


def lower(metadata: Metadata, number: int, block: jax.Array) -> Metadata:
    """Move distinct blocks, i32[P], to class 0, free ones to its tail; N is dropped."""
    free = ring.lower(metadata.groups[number].free_blocks, block)
    return metadata.changed(number, free_blocks=free)


def renew(
    metadata: Metadata, number: int, block: jax.Array, keep: ring.Keep | None
) -> Metadata:
    """Move free blocks of a group, i32[P], to the tail of the eviction order.

    They keep the order of `block`. Blocks in use stay, and N is dropped. `keep` holds
    the least class and time of each, [P]; None with one class.
    """
    group = metadata.groups[number]
    owners = gather(group.reference_counts, block, fill=1)
    free = ring.renew(group.free_blocks, block, owners == 0, keep)
    return metadata.changed(number, free_blocks=free)


def grant(
    metadata: Metadata,
    number: int,
    row: jax.Array,
    column: jax.Array,
    rank: jax.Array,
    num: jax.Array,
) -> tuple[Metadata, jax.Array]:
    """Take `num` blocks of a group, i32[], and write them to table cells, i32[P].

    A row of S or above is dropped. `rank` selects the block of each cell. Return the
    metadata and these blocks, arbitrary where a row is dropped.
    """
    metadata, taken = take(metadata, number, num, rank.shape[0])
    block = taken.peek(rank)
    return enter(metadata, number, row, column, block), block


def drop_references(group: BlockGroup, block: jax.Array) -> BlockGroup:
    """Decrement the reference count of each block, i32[P]; N is dropped.

    Blocks whose count reaches 0 enter the ring, ordered by the last lane that names
    each.
    """
    num_blocks = group.num_blocks
    counts = scatter_add(group.reference_counts, block, -1)
    dropped = gather(counts, block, fill=1) == 0

    # Several lanes may release one block: the last of them returns it.
    zeroed = jnp.where(dropped, block, num_blocks)
    counts, returns = find_one(counts, zeroed, last=True)
    return dataclasses.replace(
        group,
        reference_counts=counts,
        free_blocks=ring.push(group.free_blocks, block, returns),
    )


def exchange_references(
    group: BlockGroup, own: jax.Array, other: jax.Array
) -> BlockGroup:
    """Move a reference from each block `own` to `other`, i32[P] each; N is dropped.

    No block is in both. Free blocks of `other` leave the ring, and blocks of `own`
    whose count reaches 0 enter it.
    """
    num_blocks, counts = group.num_blocks, group.reference_counts
    owners = gather(counts, other, fill=1)
    counts, revived = find_one(
        counts, jnp.where(owners == 0, other, num_blocks), last=False
    )
    # Always true; the condition makes the write depend on the read.
    gains = written_after(owners >= 0, other, num_blocks)
    signs = np.repeat(np.array([1, -1], np.int32), other.shape[0])
    counts = scatter_add(counts, jnp.concatenate([gains, own]), jnp.asarray(signs))
    is_dropped = gather(counts, own, fill=1) == 0
    counts, returns = find_one(
        counts, jnp.where(is_dropped, own, num_blocks), last=True
    )
    return dataclasses.replace(
        group,
        reference_counts=counts,
        free_blocks=ring.exchange(group.free_blocks, other, revived, own, returns),
    )


class Revivals(NamedTuple):
    """Free blocks that B requests would share."""

    costs: jax.Array  # i32[B], free blocks that no earlier request names
    wants: jax.Array  # bool[B], True if the request names a free block


def find_revivals(group: BlockGroup, blocks: jax.Array) -> Revivals:
    """Count the free blocks, i32[B, C], that requests would revive."""
    if blocks.size == 0:
        none = jnp.zeros(blocks.shape[:1], jnp.int32)
        return Revivals(none, none > 0)
    counts = gather(group.reference_counts, blocks, fill=1)
    is_free = counts == 0
    firsts = is_first(blocks.reshape(-1), group.num_blocks)
    costs = jnp.sum(is_free & firsts.reshape(blocks.shape), axis=1, dtype=jnp.int32)
    return Revivals(costs, jnp.any(is_free, axis=1))


def add_references(group: BlockGroup, block: jax.Array) -> BlockGroup:
    """Increment the reference count of each block, i32[P]; N is dropped.

    A cached block leaves the ring, which keeps a hole in its place, or is tidied.
    """
    num_blocks = group.num_blocks
    # The first of several lanes that name a free block removes it from the ring.
    counts = group.reference_counts
    owners = gather(counts, block, fill=1)
    named = jnp.where(owners == 0, block, num_blocks)
    counts, revived = find_one(counts, named, last=False)
    # Always true; the condition makes the write depend on the read.
    gains = written_after(owners >= 0, block, num_blocks)
    return dataclasses.replace(
        group,
        reference_counts=scatter_add(counts, gains, 1),
        free_blocks=ring.tidy(ring.remove(group.free_blocks, block, revived)),
    )
