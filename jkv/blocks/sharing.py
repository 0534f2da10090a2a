"""Sharing of blocks: full blocks by reference count, partly filled ones by copy.

A block that a sequence will write must have a reference count of 1. If two sequences
agree up to the middle of a block, one of them gets a copy.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata import allocator, tables
from jkv.metadata.part import Lengths, Served
from jkv.operations import (
    Entries,
    divide,
    for_each_entry,
    fori_loop,
    gather,
    running_sum,
    scatter,
    scatter_add,
)
from jkv.state import BlockGroup, BlockStorage, Metadata
from jkv.state.index import Found
from jkv.state.windows import Columns


class ParentBlocks(NamedTuple):
    """Blocks of B parents in a group before a call."""

    blocks: jax.Array  # i32[B, M], rows of the block tables
    gap: Columns  # i32[B] or 0, released columns among the full blocks


class BlockCopies(NamedTuple):
    """Copies of blocks of a group in one call, at most one per request."""

    source: jax.Array  # i32[B], any block without a copy
    target: jax.Array  # i32[B], N without a copy


def find_lengths(
    metadata: Metadata, parents: jax.Array, lengths: jax.Array | None = None
) -> Lengths:
    """Return the lengths of open parents, i32[B], capped at `lengths`."""
    tokens = gather(metadata.context_lengths, parents)
    if lengths is not None:
        tokens = jnp.clip(lengths, 0, tokens)
    positions = metadata.sequences.pruned.positions_of(parents, tokens)
    if lengths is not None and positions is not tokens:
        positions = jnp.where(tokens == 0, 0, positions)  # starts anew
    return Lengths(tokens, *divide(tokens, metadata.block_size), positions)


def find_parent_blocks(
    group: BlockGroup, parents: jax.Array, length: Lengths
) -> ParentBlocks:
    """Return the blocks of parents, i32[B], in a group; arbitrary for closed ids."""
    blocks = gather(group.block_tables, parents)
    gap = group.window.gaps_of(parents)
    if not isinstance(gap, int):
        gap = jnp.where(length.tokens > 0, gap, 0)
    return ParentBlocks(blocks, gap)


def reference_parents(
    group: BlockGroup, past: ParentBlocks, length: Lengths, served: jax.Array
) -> BlockGroup:
    """Increment the reference counts of the full blocks of served parents, bool[B]."""

    def count(counts: jax.Array, at: Entries) -> jax.Array:
        gap = past.gap if isinstance(past.gap, int) else gather(past.gap, at.request)
        column = group.window.skip(at.rank, gap, group.block_size)
        block = gather(past.blocks, (at.request, column))
        block = jnp.where(at.valid, block, group.num_blocks)
        return scatter_add(counts, block, 1)

    counts = for_each_entry(
        jnp.where(served, length.num_full - past.gap, 0),
        past.blocks.size,
        count,
        group.reference_counts,
    )
    return dataclasses.replace(group, reference_counts=counts)


def adopt(
    metadata: Metadata, number: int, past: ParentBlocks, length: Lengths, done: Served
) -> tuple[Metadata, BlockCopies]:
    """Map the parents' full blocks to empty rows; copy partly filled tails.

    `reference_parents` has incremented the counts of the full blocks. Return the
    metadata with recorded tokens copied, and the copies due in storage.
    """
    group, row = metadata.groups[number], done.rows(metadata)
    column = jnp.arange(past.blocks.shape[1], dtype=jnp.int32)
    is_full = column[None, :] < length.num_full[:, None]
    shared = jnp.where(is_full, past.blocks, group.num_blocks)
    copied = done.served & (length.tail > 0)
    last_column = jnp.minimum(length.num_full, column.shape[0] - 1)[:, None]
    source = jnp.take_along_axis(past.blocks, last_column, axis=1)[:, 0]
    mapped = length.num_full + copied.astype(jnp.int32)
    metadata = metadata.changed(
        number,
        block_tables=scatter(group.block_tables, row, shared),
        num_mapped_blocks=scatter(group.num_mapped_blocks, row, mapped),
        window=group.window.with_gaps(row, past.gap),
    )
    return take_tails(metadata, number, copied, done.seq_ids, length.num_full, source)


def enter_found(
    metadata: Metadata, number: int, row: jax.Array, found: Found
) -> Metadata:
    """Map the whole blocks found in a group to table rows, i32[B].

    Increment the reference count of each block, so that a cached block is not evicted.
    A row of S or above is dropped.
    """
    group, of_group = metadata.groups[number], found.groups[number]
    if of_group.part is None:
        return metadata
    nothing, no_row = group.num_blocks, group.max_sequences
    blocks = jnp.where((row < no_row)[:, None], of_group.blocks, nothing)
    columns = jnp.arange(blocks.shape[1], dtype=jnp.int32)[None]
    rows = jnp.where(blocks < nothing, row[:, None], no_row)
    group = dataclasses.replace(
        group,
        block_tables=scatter(group.block_tables, (rows, columns), blocks),
        window=group.window.with_gaps(row, of_group.gap),
    )
    group = allocator.add_references(group, blocks.reshape(-1))
    return metadata.with_group(number, group)


def copy_part(
    metadata: Metadata, number: int, row: jax.Array, found: Found
) -> tuple[Metadata, BlockCopies | None]:
    """Copy the partial match of the next block to the first fresh block.

    The fresh blocks of rows, i32[B], are already mapped; a row of S gets no copy.
    Return the metadata with tokens copied, and the copies due in storage, None without
    a look-up.
    """
    group, part = metadata.groups[number], found.groups[number].part
    if part is None:
        return metadata, None
    fresh = tables.blocks_at(group, row, found.num_blocks)
    target = jnp.where(found.num_part > 0, fresh, group.num_blocks)
    copies = BlockCopies(jnp.minimum(part, group.num_blocks - 1), target)
    return metadata.with_group(number, copy_tokens(group, copies)), copies


def take_tails(
    metadata: Metadata,
    number: int,
    copied: jax.Array,
    seq_ids: jax.Array,
    column: jax.Array,
    source: jax.Array,
) -> tuple[Metadata, BlockCopies]:
    """Map a fresh block at `column` of each sequence that copies its tail, bool[B].

    Return the metadata with recorded tokens copied, and the copies of `source` due in
    storage.
    """
    rank = running_sum(copied.astype(jnp.int32))
    num_taken = rank[-1] if rank.shape[0] else jnp.int32(0)
    row = jnp.where(copied, seq_ids, metadata.max_sequences)
    metadata, block = allocator.grant(
        metadata, number, row, column, rank - 1, num_taken
    )
    group = metadata.groups[number]
    copies = BlockCopies(source, jnp.where(copied, block, group.num_blocks))
    return metadata.with_group(number, copy_tokens(group, copies)), copies


def copy_tokens(group: BlockGroup, copies: BlockCopies) -> BlockGroup:
    """Copy the recorded tokens of blocks, if the group records them."""
    if group.tokens is None:
        return group
    rows = gather(group.tokens, copies.source)
    tokens = scatter(group.tokens, copies.target, rows)
    return dataclasses.replace(group, tokens=tokens)


def copy_blocks(storage: BlockStorage, copies: BlockCopies) -> BlockStorage:
    """Return a group's storage with blocks copied.

    Outside jit there is no pass over the storage without copies.
    """
    if not may_copy(storage, copies.target):
        return storage
    return storage.with_arrays(_copy_blocks(storage.arrays, copies))


def may_copy(storage: BlockStorage, target: jax.Array) -> bool:
    """Return True if a target, i32[...], is a block, or may be, inside jit."""
    if storage.num_layers == 0 or isinstance(target, jax.core.Tracer):
        return storage.num_layers > 0
    return bool(np.any(np.asarray(target) < storage.num_blocks))


@jax.jit
def _copy_blocks(
    arrays: dict[str, jax.Array], copies: BlockCopies
) -> dict[str, jax.Array]:
    """Copy blocks in all layers; all sources are read before any target is written."""
    import chex  # importing it takes longer than importing jkv

    chex.assert_equal_shape([copies.source, copies.target])
    chex.assert_type([copies.source, copies.target], jnp.int32)
    chex.assert_equal_shape_prefix(list(arrays.values()), 4)

    def copy(pool: jax.Array) -> jax.Array:
        blocks = pool.at[:, copies.source].get(mode="clip")
        return pool.at[:, copies.target].set(blocks, mode="drop")

    # A loop of zero or one trip, as most calls copy nothing. Unlike a conditional it
    # keeps the storage in place.
    any_copy = jnp.any(copies.target < arrays["key_pool"].shape[1]).astype(jnp.int32)
    return fori_loop(
        jnp.int32(0), any_copy, lambda _, arrays: jax.tree.map(copy, arrays), arrays
    )
