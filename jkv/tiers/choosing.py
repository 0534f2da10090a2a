"""Selection of cached blocks to spill, and their removal from the prefix index.

Cached blocks are free blocks in the index. The pool evicts the least recently used one
first, and so does spilling. A block is spilled before its parents, and a block of the
leading group together with the blocks of other groups at the same position.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import allocator, ring
from jkv.operations import running_sum
from jkv.prefixes import prefix_index
from jkv.prefixes.arrays import Snapshots
from jkv.prefixes.snapshots import forget_snapshots, snapshots_of
from jkv.state import Metadata

# Carry of a scan: i32[] entries visited, and its result, i32[...].
_Counted = tuple[jax.Array, jax.Array]


class Chosen(NamedTuple):
    """Blocks to spill, and the index entries of their prefixes."""

    # Per group with blocks i32[W], with partners i32[2 W]; N for none.
    blocks: tuple[jax.Array, ...]
    # Per group, the leading group's block at each position, N_0 for none.
    above: tuple[jax.Array, ...]
    parents: jax.Array  # i32[N_0], parent of each block of the leading group
    salts: jax.Array  # i32[N_0], cache salt of each
    hashes: jax.Array  # u32[N_0], prefix hash of each
    kept: tuple[jax.Array, ...]  # i32[N_0], u32[N_0]: classes, expiry times; or ()


@functools.partial(jax.jit, static_argnames="width")
def choose(metadata: Metadata, count: jax.Array, *, width: int) -> Chosen:
    """Choose `count` cached blocks, i32[], of each group, at most W."""
    nothing = metadata.leading.num_blocks
    blocks, above = [], []
    first = find_free(metadata, metadata.leader, count, width=width, known=True)
    for number in metadata.block_numbers:
        group = metadata.groups[number]
        if number == metadata.leader:
            blocks.append(first)
            above.append(first)
            continue
        own = find_free(metadata, number, count, width=width, known=True)
        theirs = prefix_index.pairs_of(metadata, number).beside
        over = theirs.at[own].get(mode="fill", fill_value=nothing)
        is_first = jnp.any(over[:, None] == first[None], axis=1)
        own = jnp.where(is_first, group.num_blocks, own)
        partners = prefix_index.find_partners(metadata, number, first)
        found = jnp.concatenate([partners, own])
        over = jnp.concatenate([first, over])
        blocks.append(found)
        above.append(jnp.where(found < group.num_blocks, over, nothing))
    index, kept = prefix_index.index_of(metadata), metadata.leading.free_blocks.kept
    return Chosen(
        tuple(blocks),
        tuple(above),
        index.parents,
        index.salts,
        index.hashes,
        () if kept is None else (kept.classes, kept.kept_until),
    )


def find_free(
    metadata: Metadata, number: int, count: jax.Array, *, width: int, known: bool
) -> jax.Array:
    """Return the next `count` free blocks, i32[W], cached or not; N pads."""
    group, count = metadata.groups[number], jnp.minimum(count, width)

    def visit(carry: _Counted, block: jax.Array, is_entry: jax.Array) -> _Counted:
        num, found = carry
        fits = is_entry & (prefix_index.is_known(metadata, number, block) == known)
        rank = num + running_sum(fits.astype(jnp.int32)) - 1
        place = jnp.where(fits & (rank < count), rank, width)
        num += jnp.sum(fits, dtype=jnp.int32)
        return num, found.at[place].set(block, mode="drop")

    nothing = jnp.full((width,), group.num_blocks, jnp.int32)
    start = jnp.int32(0), nothing
    return ring.scan(group.free_blocks, lambda c: c[0] < count, visit, start)[1]


@jax.jit
def count_next(metadata: Metadata, wanted: jax.Array) -> jax.Array:
    """Count the cached blocks among the next to be evicted, i32[G].

    `wanted`, i32[G], is the number of evictions per group with blocks; with recurrent
    states, a last entry counts snapshots.
    """
    found = [
        _count_cached(metadata, number, wanted[at])
        for at, number in enumerate(metadata.block_numbers)
    ]
    if known := snapshots_of(metadata):
        held = metadata.index.count_snapshots()
        num_empty = known.lengths.shape[0] - held
        found.append(jnp.clip(wanted[len(found)] - num_empty, 0, held))
    return jnp.stack(found)


def _count_cached(metadata: Metadata, number: int, wanted: jax.Array) -> jax.Array:
    """Count the cached blocks among the next `wanted` of a group, i32[]."""

    def visit(carry: _Counted, block: jax.Array, is_entry: jax.Array) -> _Counted:
        num, cached = carry
        rank = num + running_sum(is_entry.astype(jnp.int32))
        goes = prefix_index.is_known(metadata, number, block)
        goes &= is_entry & (rank <= wanted)
        return rank[-1], cached + jnp.sum(goes, dtype=jnp.int32)

    free, start = metadata.groups[number].free_blocks, (jnp.int32(0), jnp.int32(0))
    return ring.scan(free, lambda carry: carry[0] < wanted, visit, start)[1]


@jax.jit
def count_blank(metadata: Metadata) -> jax.Array:
    """Return the smallest number of free, uncached blocks of any group, i32[]."""
    found = []
    for number in metadata.block_numbers:
        group = metadata.groups[number]
        block = jnp.arange(group.num_blocks, dtype=jnp.int32)
        is_cached = prefix_index.is_known(metadata, number, block)
        is_cached &= group.reference_counts == 0
        cached = jnp.sum(is_cached, dtype=jnp.int32)
        found.append(group.free_blocks.count - cached)
    return jnp.min(jnp.stack(found)) if found else jnp.int32(0)


@jax.jit
def forget(
    metadata: Metadata, blocks: tuple[jax.Array, ...], places: jax.Array
) -> Metadata:
    """Remove blocks of groups, i32[W], and snapshots from the index; N and P pad."""
    # The other groups' entries are found through the leading group's, removed last.
    numbers = metadata.block_numbers
    for number in (*metadata.followers, metadata.leader) if numbers else ():
        block, group = blocks[numbers.index(number)], metadata.groups[number]
        was_cached = prefix_index.is_known(metadata, number, block)
        was_cached &= block < group.num_blocks
        was_cached &= group.reference_counts.at[block].get(mode="clip") == 0
        num = jnp.sum(was_cached, dtype=jnp.int32)
        metadata = prefix_index.forget_blocks(metadata, number, block)
        metadata = allocator.lower(metadata, number, block)
        metadata = allocator.count_forgotten(metadata, number, num)

    def find_gone(known: Snapshots) -> jax.Array:
        return jnp.zeros_like(known.lengths, bool).at[places].set(True, mode="drop")

    return forget_snapshots(metadata, find_gone)
