"""The block tables: rows are opened and closed, columns mapped and released."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jkv.metadata import allocator, counters, gaps, requests, ring
from jkv.metadata.entries import for_each_entry
from jkv.metadata.xla_cpu import divide, running_sum, stage, written_after
from jkv.state import NO_SEQUENCE, Metadata


def locate(metadata: Metadata, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the table column and the offset of positions, i32[...], of 0 or more."""
    return divide(positions, metadata.block_size)


def num_blocks_for(metadata: Metadata, num_tokens: jax.Array) -> jax.Array:
    """Return ceil(num_tokens / T), of negatives too, without a sum that overflows."""
    full, rest = locate(metadata, num_tokens)
    return full + (rest > 0).astype(jnp.int32)


def blocks_at(metadata: Metadata, row: jax.Array, column: jax.Array) -> jax.Array:
    """Return the block in each cell of the tables, i32[...]; N outside of them.

    Args:
      metadata: the state.
      row: i32[...], not negative.
      column: i32[...].
    """
    num_rows, num_columns = metadata.block_tables.shape
    inside = (row < num_rows) & (column >= 0) & (column < num_columns)
    block = metadata.block_tables.at[row, column].get(
        mode="clip", wrap_negative_indices=False
    )
    return jnp.where(inside, block, metadata.num_blocks)


def lacks_room(
    metadata: Metadata,
    eligible: jax.Array,
    need: jax.Array,
    wants: jax.Array | None = None,
    keep_free: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Return which requests find no free row and which no free blocks, bool[B] each.

    A request refused for want of blocks leaves its row to later ones.

    Args:
      metadata: the state before the call.
      eligible: bool[B], requests not refused for another cause, which want a row each.
      need: i32[B], blocks wanted, 0 where not eligible.
      wants: bool[B], requests that cannot do without them; those with a need.
      keep_free: i32[], free blocks that are not theirs to take.
    """
    no_block, _ = requests.lacks_blocks(metadata, need, wants, keep_free)
    takes_row = eligible & ~no_block
    takes = takes_row.astype(jnp.int32)
    taken_before = running_sum(takes) - takes
    return eligible & (taken_before >= metadata.free_sequences.count), no_block


def open_rows(metadata: Metadata, served: jax.Array) -> tuple[Metadata, jax.Array]:
    """Take a free row for each served request.

    Returns:
      The metadata, and i32[B] of sequence ids, -1 where not served.
    """
    ranks = running_sum(served.astype(jnp.int32))
    row = ring.peek(metadata.free_sequences, ranks - 1)
    seq_ids = jnp.where(served, row, NO_SEQUENCE)
    row = jnp.where(served, row, metadata.max_sequences)
    num = ranks[-1] if ranks.shape[0] else jnp.int32(0)
    metadata = dataclasses.replace(
        metadata,
        is_open=metadata.is_open.at[row].set(True, mode="drop"),
        free_sequences=ring.pop(metadata.free_sequences, num),
    )
    return counters.mark_opened(metadata, row), seq_ids


def close_rows(metadata: Metadata, seq_ids: jax.Array, closable: jax.Array) -> Metadata:
    """Give back the rows and blocks of sequences, i32[B], distinct where bool[B]."""
    mapped = metadata.num_mapped_blocks.at[seq_ids].get(mode="clip")
    last = jnp.where(closable, mapped, 0)
    row = jnp.where(closable, seq_ids, metadata.max_sequences)
    gap = gaps.find_gap(metadata, seq_ids)
    # Before the loop, or it would carry a copy of what is read here and written after.
    metadata = gaps.set_gap(metadata, row, 0)
    metadata = dataclasses.replace(
        metadata,
        context_lengths=metadata.context_lengths.at[row].set(0, mode="drop"),
        num_mapped_blocks=metadata.num_mapped_blocks.at[row].add(-last, mode="drop"),
        is_open=metadata.is_open.at[row].set(False, mode="drop"),
        free_sequences=ring.push(metadata.free_sequences, seq_ids, closable),
    )
    return release_kept(metadata, seq_ids, last, gap)


@stage
def map_blocks(
    metadata: Metadata, row: jax.Array, column: jax.Array, block: jax.Array
) -> Metadata:
    """Enter fresh blocks, i32[P], in the tables; a row of S or above is dropped."""
    block = jnp.where(row < metadata.max_sequences, block, metadata.num_blocks)
    tables = metadata.block_tables.at[row, column].set(block, mode="drop")
    metadata = dataclasses.replace(metadata, block_tables=tables)
    return allocator.mark_taken(metadata, block)


def release_blocks(
    metadata: Metadata, seq_ids: jax.Array, first: jax.Array, last: jax.Array
) -> Metadata:
    """Unmap table columns first..last-1 of each sequence, the last column first.

    A block whose reference count reaches zero enters the ring, at the turn of its last
    mention. Lengths and the number of mapped blocks are the caller's to set.

    Args:
      metadata: the state.
      seq_ids: i32[B], distinct where first < last.
      first: i32[B].
      last: i32[B]; no column is released where last <= first.
    """
    return for_each_entry(
        jnp.maximum(last - first, 0),
        seq_ids.shape[0] * metadata.max_blocks_per_sequence,
        functools.partial(_release_entries, seq_ids, last, None),
        metadata,
    )


def release_kept(
    metadata: Metadata, seq_ids: jax.Array, last: jax.Array, gap: jax.Array | None
) -> Metadata:
    """Unmap all table columns before `last` of each sequence, as `release_blocks`.

    Args:
      metadata: the state.
      seq_ids: i32[B], distinct where 0 < last.
      last: i32[B]; nothing is released where it is 0.
      gap: i32[B], the columns given back, which cost nothing; None without a window.
    """
    if gap is None:
        return release_blocks(metadata, seq_ids, jnp.zeros_like(last), last)
    gap = jnp.where(last > 0, gap, 0)
    return for_each_entry(
        last - gap,
        seq_ids.shape[0] * metadata.max_blocks_per_sequence,
        functools.partial(_release_entries, seq_ids, last - gap, gap),
        metadata,
    )


def give_back(
    metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array, grows: jax.Array
) -> Metadata:
    """Return the blocks that no row of growing sequences sees again.

    In most steps of decoding few sequences have one: the loop makes a trip or none.

    Args:
      metadata: the state; without a window nothing is given back.
      seq_ids: i32[B], distinct where they grow.
      lengths: i32[B], positions of their first new rows.
      grows: bool[B].
    """
    if metadata.window is None:
        return metadata
    metadata, old, gap = gaps.widen(metadata, seq_ids, lengths, grows)
    sinks = gaps.num_sink_columns(metadata, gaps.window_of(metadata))
    return release_blocks(metadata, seq_ids, sinks + old, sinks + gap)


def _release_entries(
    seq_ids: jax.Array,
    last: jax.Array,
    gap: jax.Array | None,
    metadata: Metadata,
    _entry: jax.Array,
    request: jax.Array,
    rank: jax.Array,
    valid: jax.Array,
) -> Metadata:
    """Release one table entry per lane, i32[P]."""
    num_blocks = metadata.num_blocks
    row = jnp.where(valid, seq_ids[request], metadata.max_sequences)
    column = last[request] - 1 - rank
    if gap is not None:
        column = gaps.skip_gap(metadata, column, gap[request])
    block = blocks_at(metadata, row, column)
    row = written_after(block < num_blocks, row, metadata.max_sequences)
    tables = metadata.block_tables.at[row, column].set(num_blocks, mode="drop")
    metadata = dataclasses.replace(metadata, block_tables=tables)
    return allocator.drop_references(metadata, block)
