"""The block allocator: blocks leave at the head of a ring and come back at its tail.

A block with reference count 0 is free and stands in its group's ring, so the ring's
order is the order in which blocks were last used. With a prefix index a free block may
be found again, which revives it from the middle of the ring.

No other module touches the ring, its holes and its account: `grant` takes blocks and
names them in cells of the tables. Where they are named in several trips of a loop,
`take` comes before the loop, and `enter` names what it took.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.indexing import gather, scatter, scatter_add
from jkv.metadata import mentions, ring
from jkv.metadata.xla_cpu import stage, written_after
from jkv.state import BlockGroup, Metadata, Ring


def take(metadata: Metadata, number: int, num: jax.Array) -> tuple[Metadata, Ring]:
    """Take `num` blocks, i32[], of a group; with the ring that they left, to `peek`."""
    before = ring.expose(metadata.groups[number].free_blocks, num)
    return metadata.changed(number, free_blocks=ring.pop(before, num)), before


def enter(
    metadata: Metadata, number: int, row: jax.Array, column: jax.Array, block: jax.Array
) -> Metadata:
    """Name different blocks that were taken, i32[P], in cells; forget what they had."""
    group = metadata.groups[number]
    block = jnp.where(row < group.max_sequences, block, group.num_blocks)
    # The ring stays outside: what a stage is given and others change is copied.
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
    """Name blocks in cells, with one reference each; N is dropped."""
    return (
        scatter(tables, (row, column), block),
        scatter(counts, block, 1),
    )


def forget_taken(metadata: Metadata, number: int, block: jax.Array) -> Metadata:
    """Forget what blocks of a group, i32[P], held that were taken; N is dropped."""
    metadata, num_forgotten = metadata.index.forget(metadata, number, block)
    free = ring.forget(metadata.groups[number].free_blocks, block, num_forgotten)
    return metadata.changed(number, free_blocks=free)


def count_forgotten(metadata: Metadata, number: int, num: jax.Array) -> Metadata:
    """Count free blocks of a group, i32[], that are not found any more."""
    free = metadata.groups[number].free_blocks.added(num, forgotten=1)
    return metadata.changed(number, free_blocks=free)


def lower(metadata: Metadata, number: int, block: jax.Array) -> Metadata:
    """Let different blocks, i32[P], be of class 0, free ones as its last; N is none."""
    free = ring.lower(metadata.groups[number].free_blocks, block)
    return metadata.changed(number, free_blocks=free)


def renew(
    metadata: Metadata, number: int, block: jax.Array, keep: ring.Keep | None
) -> Metadata:
    """Let free blocks of a group, i32[P], be the last to be handed out, in this order.

    What is not free stays where it is; N is dropped. `keep` is the least class and time
    of each, [P]; None where there is one class.
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
    """Take so many blocks of a group, i32[]; name them in cells of its tables, i32[P].

    A row of S or above is dropped. The rank says which block goes to each cell;
    returned with the metadata are these blocks, anything where a row is dropped.
    """
    metadata, before = take(metadata, number, num)
    block = ring.peek(before, rank)
    return enter(metadata, number, row, column, block), block


def drop_references(group: BlockGroup, block: jax.Array) -> BlockGroup:
    """Take one reference from each block named, i32[P]; N is dropped.

    A block without any left enters the ring, in the order of the last lanes that name
    each.
    """
    num_blocks = group.num_blocks
    counts = scatter_add(group.reference_counts, block, -1)
    dropped = gather(counts, block, fill=1) == 0

    # Several lanes may have brought one block to zero: the last of them returns it.
    zeroed = jnp.where(dropped, block, num_blocks)
    counts, returns = mentions.find_one(counts, zeroed, last=True)
    return dataclasses.replace(
        group,
        reference_counts=counts,
        free_blocks=ring.push(group.free_blocks, block, returns),
    )


class Revivals(NamedTuple):
    """What it takes to share cached blocks with B requests."""

    costs: jax.Array  # i32[B], free blocks that the request is the first to name
    wants: jax.Array  # bool[B], whether it names a free block at all


def find_revivals(group: BlockGroup, blocks: jax.Array) -> Revivals:
    """Count the free blocks, i32[B, C], that requests would bring back to life."""
    if blocks.size == 0:
        none = jnp.zeros(blocks.shape[:1], jnp.int32)
        return Revivals(none, none > 0)
    counts = gather(group.reference_counts, blocks, fill=1)
    is_free = counts == 0
    is_first = mentions.is_first(blocks.reshape(-1), group.num_blocks)
    costs = jnp.sum(is_free & is_first.reshape(blocks.shape), axis=1, dtype=jnp.int32)
    return Revivals(costs, jnp.any(is_free, axis=1))


def add_references(group: BlockGroup, block: jax.Array) -> BlockGroup:
    """Give one more reference to each known block named, i32[P]; N is dropped.

    A cached block is revived: it leaves the ring, where a hole remains.
    """
    num_blocks = group.num_blocks
    # The first lane of several that name a free block takes it from the ring.
    counts = group.reference_counts
    owners = gather(counts, block, fill=1)
    named = jnp.where(owners == 0, block, num_blocks)
    counts, revived = mentions.find_one(counts, named, last=False)
    # Counts are never negative: the condition only puts the write after the read.
    gains = written_after(owners >= 0, block, num_blocks)
    return dataclasses.replace(
        group,
        reference_counts=scatter_add(counts, gains, 1),
        free_blocks=ring.remove(group.free_blocks, block, revived),
    )
