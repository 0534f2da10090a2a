"""One past under several rows: full blocks are shared, a partly filled tail is copied.

A block that a sequence will write to must be its own. Where two sequences agree up to
the middle of a block, one of them gets a copy of it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import allocator, ring, tables
from jkv.metadata.entries import for_each_entry
from jkv.metadata.xla_cpu import running_sum
from jkv.state import Metadata


class BlockCopies(NamedTuple):
    """Blocks whose contents one call copies, at most one per request."""

    source: jax.Array  # i32[B], any block where there is no copy
    target: jax.Array  # i32[B], N where there is no copy


def copy_tokens(metadata: Metadata, copies: BlockCopies) -> Metadata:
    """Copy the recorded tokens of blocks, if tokens are recorded."""
    if metadata.tokens is None:
        return metadata
    rows = metadata.tokens.at[copies.source].get(mode="clip")
    tokens = metadata.tokens.at[copies.target].set(rows, mode="drop")
    return dataclasses.replace(metadata, tokens=tokens)


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
    """Give sequences with empty rows the past of others, whose owners are counted.

    Args:
      metadata: the state.
      served: bool[B].
      seq_ids: i32[B], the sequences that continue, distinct where served.
      past: i32[B, M], the parents' table rows.
      length: i32[B], the parents' context lengths.
    """
    num_full, tail = metadata.locate(length)
    row = jnp.where(served, seq_ids, metadata.max_sequences)
    column = jnp.arange(past.shape[1], dtype=jnp.int32)
    shared = jnp.where(column[None, :] < num_full[:, None], past, metadata.num_blocks)
    copied = served & (tail > 0)
    source = jnp.take_along_axis(
        past, jnp.minimum(num_full, past.shape[1] - 1)[:, None], axis=1
    )[:, 0]
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
    """Map a fresh block at `column` of each sequence that copies its tail.

    Returns:
      The metadata, recorded tokens already copied, and the copies due in storage.
    """
    rank = running_sum(copied.astype(jnp.int32))
    taken = rank[-1] if rank.shape[0] else jnp.int32(0)
    metadata = allocator.expose(metadata, taken)
    block = ring.peek(metadata.free_blocks, rank - 1)
    target = jnp.where(copied, block, metadata.num_blocks)
    metadata = tables.map_blocks(
        metadata, jnp.where(copied, seq_ids, metadata.max_sequences), column, block
    )
    free_blocks = ring.pop(metadata.free_blocks, taken)
    metadata = dataclasses.replace(metadata, free_blocks=free_blocks)
    copies = BlockCopies(source, target)
    return copy_tokens(metadata, copies), copies
