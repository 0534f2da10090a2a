"""One past under several rows: full blocks are shared, a partly filled tail is copied.

A block that a sequence will write to must be its own. Where two sequences agree up to
the middle of a block, one of them gets a copy of it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import allocator, gaps, ring, tables
from jkv.metadata.entries import for_each_entry
from jkv.metadata.prefixes import holes
from jkv.metadata.tails import BlockCopies, copy_tokens
from jkv.metadata.xla_cpu import running_sum
from jkv.state import Metadata


class Past(NamedTuple):
    """What each of B parents has before a call."""

    blocks: jax.Array  # i32[B, M], its row of the block tables
    length: jax.Array  # i32[B], its context length, or how much of it counts
    num_full: jax.Array  # i32[B], blocks that are full
    tail: jax.Array  # i32[B], tokens in the block after them
    gap: jax.Array | None  # i32[B], of the full blocks, those given back


def find_past(
    metadata: Metadata, parents: jax.Array, lengths: jax.Array | None = None
) -> Past:
    """Look up what parents have, i32[B]; for an id that is not open it is rubbish.

    Args:
      metadata: the state.
      parents: i32[B].
      lengths: i32[B], how much of each counts, no more than there is; None is all.
    """
    length = metadata.context_lengths.at[parents].get(mode="clip")
    if lengths is not None:
        length = jnp.clip(lengths, 0, length)
    blocks = metadata.block_tables.at[parents].get(mode="clip")
    gap = gaps.find_gap(metadata, parents)
    if gap is not None:
        gap = jnp.where(length > 0, gap, 0)
    return Past(blocks, length, *tables.locate(metadata, length), gap)


def count_owners(metadata: Metadata, past: Past, served: jax.Array) -> Metadata:
    """Count one more owner for the full blocks of each past that is served, bool[B]."""

    def body(
        counts: jax.Array,
        _entry: jax.Array,
        request: jax.Array,
        rank: jax.Array,
        valid: jax.Array,
    ) -> jax.Array:
        column = rank
        if past.gap is not None:
            column = gaps.skip_gap(metadata, rank, past.gap[request])
        block = past.blocks.at[request, column].get(mode="clip")
        block = jnp.where(valid, block, metadata.num_blocks)
        return counts.at[block].add(1, mode="drop")

    num_kept = past.num_full if past.gap is None else past.num_full - past.gap
    counts = for_each_entry(
        jnp.where(served, num_kept, 0),
        past.blocks.size,
        body,
        metadata.reference_counts,
    )
    return dataclasses.replace(metadata, reference_counts=counts)


def adopt(
    metadata: Metadata, past: Past, served: jax.Array, seq_ids: jax.Array
) -> tuple[Metadata, BlockCopies]:
    """Map the parents' full blocks into these empty rows; copy partly filled tails.

    The counts of the full blocks are already raised (`count_owners`).

    Args:
      metadata: the state.
      past: the parents'.
      served: bool[B].
      seq_ids: i32[B], the sequences that continue, distinct where served.

    Returns:
      The metadata, recorded tokens copied, and the copies due in storage.
    """
    row = jnp.where(served, seq_ids, metadata.max_sequences)
    column = jnp.arange(past.blocks.shape[1], dtype=jnp.int32)
    is_full = column[None, :] < past.num_full[:, None]
    shared = jnp.where(is_full, past.blocks, metadata.num_blocks)
    copied = served & (past.tail > 0)
    last_column = jnp.minimum(past.num_full, column.shape[0] - 1)[:, None]
    source = jnp.take_along_axis(past.blocks, last_column, axis=1)[:, 0]
    mapped = past.num_full + copied.astype(jnp.int32)
    lengths, counts = metadata.context_lengths, metadata.num_mapped_blocks
    metadata = dataclasses.replace(
        metadata,
        block_tables=metadata.block_tables.at[row].set(shared, mode="drop"),
        context_lengths=lengths.at[row].set(past.length, mode="drop"),
        num_mapped_blocks=counts.at[row].set(mapped, mode="drop"),
    )
    if past.gap is not None:
        metadata = gaps.set_gap(metadata, row, past.gap)
    return take_tails(metadata, copied, seq_ids, past.num_full, source)


def take_tails(
    metadata: Metadata,
    copied: jax.Array,
    seq_ids: jax.Array,
    column: jax.Array,
    source: jax.Array,
) -> tuple[Metadata, BlockCopies]:
    """Map a fresh block at a column of each sequence that copies its tail.

    Args:
      metadata: the state.
      copied: bool[B], which sequences copy.
      seq_ids: i32[B].
      column: i32[B], of the block tables.
      source: i32[B], the block to copy.

    Returns:
      The metadata, recorded tokens copied, and the copies due in storage.
    """
    rank = running_sum(copied.astype(jnp.int32))
    num_taken = rank[-1] if rank.shape[0] else jnp.int32(0)
    metadata = holes.expose(metadata, num_taken)
    block = ring.peek(metadata.free_blocks, rank - 1)
    row = jnp.where(copied, seq_ids, metadata.max_sequences)
    metadata = tables.map_blocks(metadata, row, column, block)
    metadata = allocator.take(metadata, num_taken)
    copies = BlockCopies(source, jnp.where(copied, block, metadata.num_blocks))
    return copy_tokens(metadata, copies), copies
