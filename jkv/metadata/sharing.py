"""One past under several rows: full blocks are shared, a partly filled tail is copied.

A block that a sequence will write to must be its own. Where two sequences agree up to
the middle of a block, one of them gets a copy of it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.metadata import allocator, ring, tables
from jkv.metadata.entries import for_each_entry
from jkv.metadata.tails import BlockCopies, copy_tokens
from jkv.metadata.xla_cpu import running_sum
from jkv.state import Metadata


def count_owners(metadata: Metadata, past: jax.Array, num_full: jax.Array) -> Metadata:
    """Count one more owner for the first `num_full` blocks of each row of `past`."""

    def body(
        counts: jax.Array,
        _entry: jax.Array,
        request: jax.Array,
        rank: jax.Array,
        valid: jax.Array,
    ) -> jax.Array:
        block = past.at[request, rank].get(mode="clip")
        block = jnp.where(valid, block, metadata.num_blocks)
        return counts.at[block].add(1, mode="drop")

    counts = for_each_entry(num_full, past.size, body, metadata.reference_counts)
    return dataclasses.replace(metadata, reference_counts=counts)


def adopt(
    metadata: Metadata,
    served: jax.Array,
    seq_ids: jax.Array,
    past: jax.Array,
    length: jax.Array,
) -> tuple[Metadata, BlockCopies]:
    """Map the parents' full blocks into these empty rows; copy partly filled tails.

    The counts of the full blocks are already raised (`count_owners`).

    Args:
      metadata: the state.
      served: bool[B].
      seq_ids: i32[B], the sequences that continue, distinct where served.
      past: i32[B, M], the parents' table rows.
      length: i32[B], the parents' context lengths.

    Returns:
      The metadata, recorded tokens copied, and the copies due in storage.
    """
    num_full, tail = tables.locate(metadata, length)
    row = jnp.where(served, seq_ids, metadata.max_sequences)
    column = jnp.arange(past.shape[1], dtype=jnp.int32)
    shared = jnp.where(column[None, :] < num_full[:, None], past, metadata.num_blocks)
    copied = served & (tail > 0)
    last_column = jnp.minimum(num_full, past.shape[1] - 1)[:, None]
    source = jnp.take_along_axis(past, last_column, axis=1)[:, 0]
    mapped = num_full + copied.astype(jnp.int32)
    metadata = dataclasses.replace(
        metadata,
        block_tables=metadata.block_tables.at[row].set(shared, mode="drop"),
        context_lengths=metadata.context_lengths.at[row].set(length, mode="drop"),
        num_mapped_blocks=metadata.num_mapped_blocks.at[row].set(mapped, mode="drop"),
    )
    return take_tails(metadata, copied, seq_ids, num_full, source)


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
    metadata = allocator.expose(metadata, num_taken)
    block = ring.peek(metadata.free_blocks, rank - 1)
    row = jnp.where(copied, seq_ids, metadata.max_sequences)
    metadata = tables.map_blocks(metadata, row, column, block)
    metadata = allocator.take(metadata, num_taken)
    copies = BlockCopies(source, jnp.where(copied, block, metadata.num_blocks))
    return copy_tokens(metadata, copies), copies
