"""The query rows of a program, and their visible tokens.

Row r of a tile is query head `r % row_heads` of token `r // row_heads`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import find_held
from jkv.attention.kernel import backend
from jkv.attention.kernel.bodies.loads import Operands
from jkv.attention.kernel.tiles.variant import Variant
from jkv.attention.kernel.work.lists import Lanes, SharedLanes


class QueryRows(NamedTuple):
    """A tile of rows of one kv head; of one request, except for shared pieces."""

    entry: jax.Array  # i32[], index in the work list
    piece: jax.Array  # i32[], of the context, if it is split by position
    kv_head: jax.Array  # i32[]
    row: jax.Array  # i32[rows]
    head: jax.Array  # i32[rows]
    offset: jax.Array  # i32[rows], in tokens from the first row
    valid: jax.Array  # bool[rows], False for padding
    position: jax.Array  # i32[], of the first row


class VisibleRange(NamedTuple):
    """The visible tokens of each row of a tile: after `before`, up to `last`."""

    last: jax.Array  # i32[rows]
    before: jax.Array | None  # i32[rows], None for full attention
    valid: jax.Array  # bool[rows], with a visible token; by position, rows to store

    def bound(self, first: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Clip a range to each row's visible tokens; first and last, i32[rows]."""
        last = jnp.minimum(self.last, end - 1)
        if self.before is None:
            return jnp.broadcast_to(first, last.shape), last
        return jnp.maximum(first, self.before + 1), last


def locate_rows(o: Operands, variant: Variant) -> QueryRows:
    """Return the rows of this program."""
    num_heads, work = o.queries.shape[1], o.work
    heads_per_kv = num_heads // o.keys.shape[2]
    # Head tiles of an entry are adjacent, as they may read the same tokens.
    program, head_tiles = backend.program_id(0), jnp.int32(variant.head_tiles)
    entry, head_tile = lax.div(program, head_tiles), lax.rem(program, head_tiles)
    piece = jnp.int32(0)
    if variant.num_pieces:
        num_pieces = jnp.int32(variant.num_pieces)
        entry, piece = lax.div(entry, num_pieces), lax.rem(entry, num_pieces)
    tiles_per_head = jnp.int32(-(-heads_per_kv // variant.row_heads))
    kv_head = lax.div(head_tile, tiles_per_head)
    index = jnp.arange(variant.row_tokens * variant.row_heads, dtype=jnp.int32)
    offset = index >> (variant.row_heads.bit_length() - 1)
    head = lax.rem(head_tile, tiles_per_head) * variant.row_heads
    head += index & (variant.row_heads - 1)
    valid = head < heads_per_kv
    head += kv_head * heads_per_kv
    if isinstance(o.lanes, SharedLanes):
        valid &= offset < work.num_rows[entry]
        row, position = o.lanes.row[entry, offset], work.position[entry]
        return QueryRows(entry, piece, kv_head, row, head, offset, valid, position)
    if o.lanes is not None:
        lanes, lane = o.lanes, offset
        valid &= (piece >= lanes.first[entry]) & (piece < lanes.end[entry, lane])
        row, offset = lanes.row[entry, lane], lanes.position[entry, lane]
        start = jnp.int32(0)  # lanes hold absolute positions
        return QueryRows(entry, piece, kv_head, row, head, offset, valid, start)
    valid &= offset < work.num_rows[entry]
    if variant.num_pieces:
        # All rows of the tile store all pieces that begin in its range.
        valid &= piece * variant.piece_tokens < work.end[entry]
    row = work.row[entry] + offset
    position = work.position[entry]
    return QueryRows(entry, piece, kv_head, row, head, offset, valid, position)


def find_last(o: Operands, position: jax.Array, variant: Variant) -> jax.Array:
    """Return the last local token at or before a position."""
    part = None if o.part is None else o.part[0]
    return find_held(position, part, variant.num_parts, o.keys.shape[3])


def read_window(o: Operands) -> jax.Array | None:
    """Return the sliding window, i32[], None for full attention."""
    return None if o.window is None else jnp.maximum(o.window[0], 0)


def find_range(
    o: Operands, rows: QueryRows, window: jax.Array | None, variant: Variant
) -> tuple[jax.Array, jax.Array]:
    """Return the range of tokens that any row attends to: first, and past the last.

    Clips the range of the work list to this call's window and the local blocks.
    """
    work, entry, position = o.work, rows.entry, rows.position
    first, end = work.first[entry], work.end[entry]
    if variant.num_pieces:
        first = rows.piece * variant.piece_tokens
        end = jnp.minimum(end, first + variant.piece_tokens)
    if isinstance(o.lanes, Lanes):
        # Earlier pieces of these rows are processed in another request's tile.
        end = jnp.where(rows.piece < o.lanes.first[entry], 0, end)
    if o.part is not None:
        last = position + work.num_rows[entry] - 1
        end = jnp.minimum(end, find_last(o, last, variant) + 1)
    if window is not None:
        first = jnp.maximum(first, find_last(o, position - window, variant) + 1)
    if o.part is not None or window is not None or variant.num_pieces:
        is_empty = first >= end
        first, end = jnp.where(is_empty, 0, first), jnp.where(is_empty, 0, end)
    return first, end


def find_seen(
    o: Operands, rows: QueryRows, window: jax.Array | None, variant: Variant
) -> VisibleRange:
    """Return the visible tokens of each row."""
    position = rows.position
    last = find_last(o, position + rows.offset, variant)
    valid, before = rows.valid, None
    if window is not None:
        before = find_last(o, position + rows.offset - window, variant)
    if variant.has_past:
        first, end = o.work.first[rows.entry], o.work.end[rows.entry]
        last = jnp.minimum(last, end - 1)
        least = jnp.broadcast_to(first - 1, last.shape)
        before = least if before is None else jnp.maximum(before, least)
    if not variant.num_pieces:  # by position, rows also store empty pieces
        valid &= last >= 0 if before is None else last > before
    return VisibleRange(last, before, valid)


def see(seen: VisibleRange, token: jax.Array) -> jax.Array:
    """Return the mask of the tokens i32[tokens], bool[rows, tokens]."""
    visible = token[None, :] <= seen.last[:, None]
    if seen.before is not None:
        visible &= token[None, :] > seen.before[:, None]
    return visible
