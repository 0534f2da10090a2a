"""Block tables: open and close rows, look up and release columns."""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.metadata import allocator, ring
from jkv.metadata.ring import Keep
from jkv.operations import (
    MOST_COMPARED,
    Entries,
    divide,
    find_chunk,
    for_each_entry,
    gather,
    running_sum,
    scatter,
    scatter_add,
    while_loop,
    written_after,
)
from jkv.state import NO_SEQUENCE, BlockGroup, Metadata, Ring, SequenceRow
from jkv.state.windows import Columns

# Columns released per trip when sequences grow: few enough to compare pairwise.
_GIVEN_BACK_PER_TRIP = MOST_COMPARED


def locate(positions: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Return table column and offset of positions >= 0, i32[...]."""
    return divide(positions, size)


def num_blocks_for(num_tokens: jax.Array, size: int) -> jax.Array:
    """Return ceil(num_tokens / T), also of negatives, without overflow."""
    full, rest = divide(num_tokens, size)
    return full + (rest > 0).astype(jnp.int32)


def blocks_at(group: BlockGroup, row: jax.Array, column: jax.Array) -> jax.Array:
    """Return the block in each cell of the tables, i32[...]; N outside."""
    num_rows, num_columns = group.block_tables.shape
    inside = (row < num_rows) & (column >= 0) & (column < num_columns)
    block = gather(group.block_tables, (row, column))
    return jnp.where(inside, block, group.num_blocks)


def lacks_row(
    metadata: Metadata, eligible: jax.Array, no_block: jax.Array
) -> jax.Array:
    """Return True for eligible requests, bool[B], without a free row, bool[B].

    A request refused for lack of blocks, `no_block`, takes no row.
    """
    takes = (eligible & ~no_block).astype(jnp.int32)
    taken_before = running_sum(takes) - takes
    return eligible & (taken_before >= metadata.sequences.free_rows.count)


def open_rows(
    metadata: Metadata, served: jax.Array, context_lengths: jax.Array | int
) -> tuple[Metadata, jax.Array]:
    """Open a row for each served request; return ids, i32[B], -1 elsewhere.

    Sequences start with `context_lengths`, i32[B].
    """
    sequences = metadata.sequences
    ranks = running_sum(served.astype(jnp.int32))
    row = ring.peek(sequences.free_rows, ranks - 1)
    seq_ids = jnp.where(served, row, NO_SEQUENCE)
    row = jnp.where(served, row, sequences.max_sequences)
    num = ranks[-1] if ranks.shape[0] else jnp.int32(0)
    stamp = sequences.next_stamp
    opened = SequenceRow(context_lengths, 1, stamp, stamp, 0)
    metadata = metadata.with_sequences(free_rows=ring.pop(sequences.free_rows, num))
    return metadata.with_rows(row, opened), seq_ids


def close_rows(metadata: Metadata, seq_ids: jax.Array, closable: jax.Array) -> Metadata:
    """Close the rows of sequences, i32[B], distinct where bool[B]."""
    sequences = metadata.sequences
    row = jnp.where(closable, seq_ids, sequences.max_sequences)
    free_rows = ring.push(sequences.free_rows, seq_ids, closable)
    metadata = metadata.with_sequences(free_rows=free_rows)
    return metadata.with_rows(row, SequenceRow(0, 0, 0, 0, 0))


def empty_rows(
    group: BlockGroup, seq_ids: jax.Array, closable: jax.Array
) -> BlockGroup:
    """Release all blocks of sequences, i32[B], distinct where bool[B], in a group."""
    mapped = gather(group.num_mapped_blocks, seq_ids)
    last = jnp.where(closable, mapped, 0)
    row = jnp.where(closable, seq_ids, group.max_sequences)
    gap = group.window.gaps_of(seq_ids)
    # Update before the loop, which would otherwise carry a copy of both arrays.
    group = dataclasses.replace(
        group,
        num_mapped_blocks=scatter_add(group.num_mapped_blocks, row, -last),
        window=group.window.with_gaps(row, 0),
    )
    return release_kept(group, seq_ids, last, gap)


def keep_blocks(
    metadata: Metadata, number: int, seq_ids: jax.Array, closable: jax.Array, keep: Keep
) -> Metadata:
    """Raise the retention classes of the indexed blocks of sequences, i32[B].

    Closable sequences, bool[B], are distinct; `keep` has one class and time each, [B].
    """
    group = metadata.groups[number]
    gap = group.window.gaps_of(seq_ids)

    def note(free: Ring, at: Entries) -> Ring:
        row = jnp.where(at.valid, gather(seq_ids, at.request), group.max_sequences)
        gone = gap if isinstance(gap, int) else gather(gap, at.request)
        column = group.window.skip(at.rank, gone, group.block_size)
        block = blocks_at(group, row, column)
        is_known = metadata.index.knows(metadata, number, block)
        block = jnp.where(is_known, block, group.num_blocks)
        of = Keep(gather(keep.classes, at.request), gather(keep.until, at.request))
        return ring.raise_classes(free, block, of)

    mapped = gather(group.num_mapped_blocks, seq_ids)
    num = jnp.where(closable, mapped - gap, 0)
    most = seq_ids.shape[0] * group.max_blocks_per_sequence
    free = for_each_entry(num, most, note, group.free_blocks)
    return metadata.changed(number, free_blocks=free)


def release_blocks(
    group: BlockGroup, seq_ids: jax.Array, first: jax.Array, last: jax.Array
) -> BlockGroup:
    """Unmap table columns first..last-1 of each sequence, the last column first.

    Sequences, i32[B], are distinct where first < last; others release nothing. A block
    whose reference count reaches zero enters the ring, ordered by its last mention. The
    caller updates lengths and the number of mapped blocks.
    """
    return _release(group, seq_ids, jnp.maximum(last - first, 0), last, 0)


def release_kept(
    group: BlockGroup, seq_ids: jax.Array, last: jax.Array, gap: Columns
) -> BlockGroup:
    """Unmap all columns before `last`, i32[B], except the gap, as `release_blocks`."""
    num_kept = jnp.where(last > 0, last - gap, 0)
    return _release(group, seq_ids, num_kept, num_kept, gap)


def _release(
    group: BlockGroup, seq_ids: jax.Array, num: jax.Array, last: jax.Array, gap: Columns
) -> BlockGroup:
    """Release `num` mapped blocks of each sequence, from rank `last` - 1 downwards."""

    def release(group: BlockGroup, at: Entries) -> BlockGroup:
        row = jnp.where(at.valid, gather(seq_ids, at.request), group.max_sequences)
        gone = gap if isinstance(gap, int) else gather(gap, at.request)
        kept = gather(last, at.request) - 1 - at.rank
        return _unmap(group, row, group.window.skip(kept, gone, group.block_size))

    most = seq_ids.shape[0] * group.max_blocks_per_sequence
    return for_each_entry(num, most, release, group)


def _unmap(group: BlockGroup, row: jax.Array, column: jax.Array) -> BlockGroup:
    """Empty cells, i32[P], and drop their references; ignore rows >= S."""
    block = blocks_at(group, row, column)
    row = written_after(block < group.num_blocks, row, group.max_sequences)
    tables = scatter(group.block_tables, (row, column), group.num_blocks)
    group = dataclasses.replace(group, block_tables=tables)
    return allocator.drop_references(group, block)


def slide_window(
    group: BlockGroup, seq_ids: jax.Array, lengths: jax.Array, grows: jax.Array
) -> BlockGroup:
    """Release the blocks outside the window of growing sequences, bool[B].

    Their first new rows are at `lengths`, i32[B]. Columns are released in request
    order, first columns first. Few decode steps leave a block, so the loop usually has
    no trips.
    """
    unseen = group.window.unseen_from(lengths, group.block_size)
    if isinstance(unseen, int):  # no window: nothing is released
        return group
    width = min(_GIVEN_BACK_PER_TRIP, seq_ids.shape[0] * group.max_blocks_per_sequence)
    sinks = group.window.sink_columns(group.block_size)
    behind = jnp.where(grows, unseen - group.window.gaps_of(seq_ids), 0)
    Carry = tuple[BlockGroup, jax.Array]

    def trip(carry: Carry) -> Carry:
        group, left = carry
        at, num_done = find_chunk(left, width)
        row = jnp.where(at.valid, gather(seq_ids, at.request), group.max_sequences)
        group = _unmap(group, row, sinks + group.window.gaps_of(row) + at.rank)
        group = dataclasses.replace(group, window=group.window.with_one_more(row))
        return group, left - num_done

    group, _ = while_loop(
        lambda carry: jnp.any(carry[1] > 0), trip, (group, jnp.maximum(behind, 0))
    )
    return group
