"""Layout of a tree: positions, blocks, and the row of each slot.

All segments are computed in parallel, at any depth. Each has its ancestors 1, 2, 4, 8,
... levels above (binary lifting), so the ancestor that holds a position is found in
O(log S) steps.

Symbols: R rows, S segments, N blocks, T tokens per block, M columns of block tables.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.sequences.trajectory_tree import TrajectoryTree
from jkv.operations import find_owners, scatter_add, scatter_max, scatter_min


class SegmentTable(NamedTuple):
    """Positions of segments; entry S of the longer arrays stands for no segment."""

    first_rows: jax.Array  # i32[S + 1], R for an empty segment
    lengths: jax.Array  # i32[S + 1]
    starts: jax.Array  # i32[S + 1], tokens of its ancestors
    ancestors: jax.Array  # i32[levels, S + 1], 1, 2, 4, ... levels above, or S
    is_sound: jax.Array  # bool[S], the segment and its ancestors are valid

    @property
    def num_segments(self) -> int:
        return self.is_sound.shape[0]

    @property
    def ends(self) -> jax.Array:
        """Tokens of each segment's sequence, i32[S + 1]."""
        return self.starts + self.lengths


class Layout(NamedTuple):
    """A tree as attention input: segments are requests with shared blocks."""

    table: SegmentTable
    positions: jax.Array  # i32[R], position in its sequence, 0 without a token
    is_token: jax.Array  # bool[R]
    blocks: jax.Array  # i32[R], block of each row's token, N without one
    block_tables: jax.Array  # i32[S, M], N for unmapped columns
    slot_rows: jax.Array  # i32[N, T], the row in each slot, R for none


def count_blocks(num_rows: int, num_segments: int, block_size: int) -> int:
    """Return enough blocks for any tree of these sizes.

    A segment that starts inside a block copies the block's beginning; its n tokens then
    occupy at most (n + 2 (T - 1)) / T blocks.
    """
    return max(1, (num_rows + 2 * num_segments * (block_size - 1)) // block_size)


def find_segment_table(tree: TrajectoryTree) -> SegmentTable:
    """Return the positions of segments; an invalid one counts as a root."""
    num_rows, count = tree.num_rows, tree.num_segments
    segment = jnp.where(tree.segments >= 0, tree.segments, count)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    first = jnp.full((count + 1,), num_rows, jnp.int32)
    first = scatter_min(first, segment, row).at[count].set(num_rows)
    last = scatter_max(jnp.full((count + 1,), -1, jnp.int32), segment, row)
    lengths = scatter_add(jnp.zeros((count + 1,), jnp.int32), segment, 1)
    lengths = lengths.at[count].set(0)

    number = jnp.arange(count, dtype=jnp.int32)
    has_parent = (tree.parents >= 0) & (tree.parents < number)
    is_wrong = (tree.parents != -1) & ~has_parent
    is_wrong |= (lengths[:-1] > 0) & (last[:-1] - first[:-1] + 1 != lengths[:-1])
    is_wrong = jnp.append(is_wrong, False)
    above = jnp.append(jnp.where(has_parent, tree.parents, count), jnp.int32(count))
    # Each round adds the lengths of as many further ancestors and doubles the reach.
    starts, ancestors = lengths[above], []
    for _ in range(max(1, (count - 1).bit_length())):
        ancestors.append(above)
        is_wrong |= is_wrong[above]
        starts += starts[above]
        above = above[above]
    return SegmentTable(first, lengths, starts, jnp.stack(ancestors), ~is_wrong[:-1])


def find_segments(
    table: SegmentTable, segments: jax.Array, positions: jax.Array
) -> jax.Array:
    """Return the segment that holds each position of sequences, i32[...].

    Sequences are given by their segments, i32[...]; a position past the end belongs to
    the segment itself.
    """
    segments, positions = jnp.broadcast_arrays(segments, positions)
    for ancestors in reversed(table.ancestors):
        above = ancestors[segments]
        # The last one below this segment: all before it start after the position.
        segments = jnp.where(table.starts[above] > positions, above, segments)
    parent = table.ancestors[0][segments]
    return jnp.where(table.starts[segments] > positions, parent, segments)


def find_rows(
    table: SegmentTable, segments: jax.Array, positions: jax.Array
) -> jax.Array:
    """Return the rows of positions of sequences, i32[...]."""
    holding = find_segments(table, segments, positions)
    return table.first_rows[holding] + positions - table.starts[holding]


def lay_out(tree: TrajectoryTree, block_size: int) -> Layout:
    """Assign blocks to each segment; block tables start with its ancestors' blocks.

    Invalid segments, and sequences longer than `max_length`, have no rows in it.
    """
    table = find_segment_table(tree)
    count, num_rows = tree.num_segments, tree.num_rows
    fits = (table.ends <= tree.max_length).at[:-1].min(table.is_sound)
    lengths = jnp.where(fits, table.lengths, 0)
    table = table._replace(lengths=lengths, is_sound=fits[:-1])
    # Ancestors of a valid segment are valid, so all positions it reads have rows.
    starts, ends = table.starts[:-1], table.ends[:-1]
    first_columns = jax.lax.div(starts, jnp.int32(block_size))
    last_columns = jax.lax.div(jnp.maximum(ends - 1, 0), jnp.int32(block_size))
    owned = jnp.where(lengths[:-1] > 0, last_columns - first_columns + 1, 0)
    behind = jnp.cumsum(owned, dtype=jnp.int32)
    first_blocks = behind - owned
    num_blocks = count_blocks(num_rows, count, block_size)

    owners = find_owners(first_blocks, 0, num_blocks)
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    columns = first_columns[owners] + block - first_blocks[owners]
    offset = jnp.arange(block_size, dtype=jnp.int32)[None]
    held = columns[:, None] * block_size + offset
    is_held = (held < ends[owners][:, None]) & (block < behind[-1])[:, None]
    slot_rows = find_rows(table, owners[:, None], held)

    # A column's block belongs to the segment with the sequence's last token in it.
    num_columns = max(1, -(-tree.max_length // block_size))
    column = jnp.arange(num_columns, dtype=jnp.int32)[None]
    last = jnp.minimum(column * block_size + block_size, ends[:, None]) - 1
    number = jnp.arange(count, dtype=jnp.int32)
    holding = find_segments(table, number[:, None], jnp.maximum(last, 0))
    holding = jnp.minimum(holding, count - 1)
    tables = first_blocks[holding] + column - first_columns[holding]
    tables = jnp.where(column * block_size < ends[:, None], tables, num_blocks)

    segment = jnp.clip(tree.segments, 0, count - 1)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    is_token = (tree.segments >= 0) & (tree.segments < count) & (tree.tokens >= 0)
    is_token &= fits[segment]
    positions = starts[segment] + row - table.first_rows[segment]
    positions = jnp.where(is_token, positions, 0)
    blocks = tables[segment, jax.lax.div(positions, jnp.int32(block_size))]
    return Layout(
        table=table,
        positions=positions,
        is_token=is_token,
        blocks=jnp.where(is_token, blocks, num_blocks),
        block_tables=tables,
        slot_rows=jnp.where(is_held, slot_rows, num_rows),
    )
