"""Gaps: the columns of the block tables that a sliding window has given back.

A row at position p sees the tokens from `p - length + 1` on, and those of the sinks.
The rows of a sequence go on from where it ends, so what the next row does not see is
seen by no later one. `append` gives back what its first row does not see, before it
takes new blocks: what it returns, the rows of the steps before have seen.

The columns given back are a gap in a sequence's row of the tables, behind the blocks of
the sinks. Positions never change: a token's column is its position divided by T, as
ever. Without a window there are no gaps, and nothing here is traced.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.metadata.xla_cpu import divide, stage
from jkv.state import Metadata, SlidingWindow


def num_sink_columns(metadata: Metadata, window: SlidingWindow) -> int:
    """Return the columns at the start of each row that are never given back."""
    return -(-window.num_sink_tokens // metadata.block_size)


def find_gap(metadata: Metadata, seq_ids: jax.Array) -> jax.Array | None:
    """Return the columns given back of each sequence, i32[...]; None without a window.

    For an id that is not open it is anything.
    """
    if metadata.window is None:
        return None
    return metadata.window.num_given_back.at[seq_ids].get(mode="clip")


def skip_gap(metadata: Metadata, rank: jax.Array, gap: jax.Array | None) -> jax.Array:
    """Return the column of the kept block of each rank, i32[P], in sequences with gaps.

    Args:
      metadata: the state.
      rank: i32[P], 0 for the first kept block.
      gap: i32[P], the columns given back.
    """
    if metadata.window is None or gap is None:
        return rank
    is_behind = rank >= num_sink_columns(metadata, metadata.window)
    return jnp.where(is_behind, rank + gap, rank)


def find_unseen(metadata: Metadata, lengths: jax.Array) -> jax.Array:
    """Return the columns, i32[B], that no row from these lengths on, i32[B], sees.

    Those of the sinks are not among them.

    Args:
      metadata: with a window.
      lengths: i32[B], positions of the next rows, of 0 or more.
    """
    window = window_of(metadata)
    column, _ = divide(
        jnp.maximum(lengths - (window.length - 1), 0), metadata.block_size
    )
    return jnp.maximum(column - num_sink_columns(metadata, window), 0)


def cut_off(metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return which sequences could not go on from earlier lengths, bool[B].

    What the row after that length sees must be there still. A sequence can always begin
    anew, from length 0.

    Args:
      metadata: with a window.
      seq_ids: i32[B].
      lengths: i32[B], no longer than the sequences are; for a negative one the answer
        may be anything.
    """
    gap = window_of(metadata).num_given_back.at[seq_ids].get(mode="clip")
    return (lengths != 0) & (gap > find_unseen(metadata, jnp.maximum(lengths, 0)))


def set_gap(metadata: Metadata, row: jax.Array, gap: jax.Array | int) -> Metadata:
    """Note the columns given back of rows, i32[B]; one of S or above is dropped."""
    if metadata.window is None:
        return metadata
    window = metadata.window
    given_back = window.num_given_back.at[row].set(gap, mode="drop")
    window = dataclasses.replace(window, num_given_back=given_back)
    return dataclasses.replace(metadata, window=window)


@stage
def widen(
    metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array, grows: jax.Array
) -> tuple[Metadata, jax.Array, jax.Array]:
    """Note the columns that no row of growing sequences sees from these lengths on.

    Args:
      metadata: with a window.
      seq_ids: i32[B], distinct where they grow.
      lengths: i32[B], positions of their first new rows.
      grows: bool[B].

    Returns:
      The metadata, and i32[B] twice: the columns given back before, and now.
    """
    old = window_of(metadata).num_given_back.at[seq_ids].get(mode="clip")
    gap = jnp.maximum(old, find_unseen(metadata, lengths))
    gap = jnp.where(grows, gap, old)
    row = jnp.where(grows, seq_ids, metadata.max_sequences)
    return set_gap(metadata, row, gap), old, gap


def is_kept(metadata: Metadata, seq_id: jax.Array, positions: jax.Array) -> jax.Array:
    """Return whether a sequence, i32[], has not given these positions back, bool[P]."""
    gap = find_gap(metadata, seq_id)
    if gap is None:
        return jnp.ones(positions.shape, bool)
    first = num_sink_columns(metadata, window_of(metadata))
    column, _ = divide(positions, metadata.block_size)
    return (column < first) | (column >= first + gap)


def find_start(metadata: Metadata, seq_ids: jax.Array) -> jax.Array:
    """Return the position from which sequences, i32[...], have their tokens.

    Those of sinks come before; 0 where nothing was given back.
    """
    gap = find_gap(metadata, seq_ids)
    if gap is None:
        return jnp.zeros(seq_ids.shape, jnp.int32)
    first = num_sink_columns(metadata, window_of(metadata))
    return jnp.where(gap > 0, (first + gap) * metadata.block_size, 0)


def find_gone(metadata: Metadata) -> jax.Array:
    """Return which cells of the tables were given back, bool[S, M]."""
    column = jnp.arange(metadata.max_blocks_per_sequence, dtype=jnp.int32)[None]
    if metadata.window is None:
        return jnp.zeros(column.shape, bool)
    first = num_sink_columns(metadata, metadata.window)
    gap = metadata.window.num_given_back[:, None]
    return (column >= first) & (column < first + gap)


def window_of(metadata: Metadata) -> SlidingWindow:
    """Return the window of a metadata that has one."""
    assert metadata.window is not None, "asked of caches with a window only"
    return metadata.window
