"""The block allocator: blocks leave at the head of a ring and come back at its tail.

A block with reference count 0 is free and stands in the ring, so the ring's order is
the order in which blocks were last used. With a prefix index a free block may be found
again and revived, which leaves a hole in the ring (`jkv/metadata/prefixes/holes.py`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.metadata import mentions, ring
from jkv.metadata.prefixes import prefix_index
from jkv.state import Metadata


def take(metadata: Metadata, num: jax.Array) -> Metadata:
    """Drop `num` blocks, i32[], from the head of the ring.

    No hole may be among them: `holes.expose` comes before.
    """
    free_blocks = ring.pop(metadata.free_blocks, num)
    return dataclasses.replace(metadata, free_blocks=free_blocks)


def mark_taken(metadata: Metadata, block: jax.Array) -> Metadata:
    """Give blocks, i32[P], one reference each and forget their contents.

    Blocks of N are dropped. The caller takes them from the ring.
    """
    counts = metadata.reference_counts.at[block].set(1, mode="drop")
    metadata = dataclasses.replace(metadata, reference_counts=counts)
    return prefix_index.forget_recycled(metadata, block)


def drop_references(metadata: Metadata, block: jax.Array) -> Metadata:
    """Take one reference from each block named, i32[P]; N is dropped.

    A block without any left enters the ring, at the turn of its last mention.
    """
    num_blocks = metadata.num_blocks
    counts = metadata.reference_counts.at[block].add(-1, mode="drop")
    dropped = counts.at[block].get(mode="fill", fill_value=1) == 0

    # Several lanes may have brought one block to zero: the last of them returns it.
    zeroed = jnp.where(dropped, block, num_blocks)
    counts, returns = mentions.find_one(counts, zeroed, last=True)
    place, num = ring.places(metadata.free_blocks, returns)
    metadata = dataclasses.replace(
        metadata,
        reference_counts=counts,
        free_blocks=ring.enter(metadata.free_blocks, block, place, num),
    )
    return prefix_index.note_places(
        metadata, jnp.where(returns, block, num_blocks), place
    )
