"""The attention kernel: straight out of the pool, one body for decoding and prefill.

A program takes a tile of query rows of one request and one kv head, walks a range of
the request's tokens, and keeps softmax sums (online softmax, arXiv 2205.14135). When
decoding the ranges are pieces of contexts, and a program leaves a normalised partial
result in float32 and its log-sum-exp.

What the Triton lowering asks for shapes the code: every operand is passed whole and
indexed by hand (the pool, the layer and the tables go in as they are, nothing is sliced
or gathered outside); every tile is a power of two, so the query heads of a kv head are
padded, and head dims are cut into powers of two; shifts and masks instead of divisions.

Tokens are clamped into the visible range, so nothing stale or foreign is ever loaded,
and only scores need a mask. Scores carry a factor log2(e): the hardware has exp2.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.kernel import backend
from jkv.attention.kernel.loads import (
    Operands,
    Range,
    TokenTile,
    clamp_index,
    columns_of,
    cut,
    load_rows,
    load_tokens,
    over_section,
    to_operands,
)
from jkv.attention.kernel.sums import HIDDEN, LN2, LOG2E, TileSums, start_sums
from jkv.attention.kernel.variant import Variant
from jkv.attention.parts import find_held


def attend_range(
    operands: Operands,
    output_before: jax.Array | None,
    lse_before: jax.Array | None,
    output_ref: jax.Array,
    lse_ref: jax.Array,
    *,
    variant: Variant,
) -> None:
    """Attend from one tile of rows to one range of tokens.

    Decoding writes f32[W, H, Dv] and the log2 of the sums f32[W, H], by position each
    row does, with W = R * pieces; otherwise the rows of [R, H, Dv] and f32[R, H], which
    alias the arrays before, are replaced.
    """
    del output_before, lse_before
    o, work = operands, operands.work
    num_heads, head_dim = o.queries.shape[1:]
    heads_per_kv = num_heads // o.keys.shape[2]
    value_sections = cut(variant.value_dim)
    key_sections = cut(head_dim)
    if o.values is None:
        rest = cut(head_dim - variant.value_dim, variant.value_dim)
        key_sections = value_sections + rest

    # Row r of the tile is query head r % row_heads of token r // row_heads.
    # The head tiles of an entry follow each other: they may read the same tokens.
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
    valid = (head < heads_per_kv) & (offset < work.num_rows[entry])
    head += kv_head * heads_per_kv
    row = work.row[entry] + offset

    def find_last(position: jax.Array) -> jax.Array:
        """Return the last token in the pools up to a position."""
        part = None if o.part is None else o.part[0]
        return find_held(position, part, variant.num_parts, o.keys.shape[3])

    position = work.position[entry]
    window = None if o.window is None else jnp.maximum(o.window[0], 0)
    first, end = work.first[entry], work.end[entry]
    if variant.num_pieces:
        # All rows of the tile store all pieces that begin in its range.
        first = piece * variant.piece_tokens
        valid &= first < end
        end = jnp.minimum(end, first + variant.piece_tokens)
    # Of a range listed for the whole step, what these rows see of what is here.
    if o.part is not None:
        end = jnp.minimum(end, find_last(position + work.num_rows[entry] - 1) + 1)
    if window is not None:
        first = jnp.maximum(first, find_last(position - window) + 1)
    if o.part is not None or window is not None or variant.num_pieces:
        is_empty = first >= end
        first, end = jnp.where(is_empty, 0, first), jnp.where(is_empty, 0, end)

    last, before = jnp.int32(0), None
    if not variant.is_decode:
        last = find_last(position + offset)
        if window is not None:
            before = find_last(position + offset - window)
        if not variant.num_pieces:
            valid &= last >= 0 if before is None else last > before
    queries = [
        load_rows(o.queries, row, head, valid, section, variant)
        for section in key_sections
    ]

    # The walk starts at a multiple of the tile, so that a tile lies in one block.
    tokens = Range(
        layer=jnp.clip(o.layer[0], 0, o.keys.shape[0] - 1),
        table=work.table[entry],
        kv_head=kv_head,
        first=first,
        end=end,
    )
    tile_tokens = variant.tile.tokens
    walk_start = tokens.first & -tile_tokens
    scale = o.scale[0] * (LOG2E if variant.soft_cap is None else 1.0)

    def see(token: jax.Array) -> jax.Array:
        """Return which rows see which tokens, to broadcast over the scores."""
        if variant.is_decode:
            visible = token < tokens.end
            if window is not None:
                visible &= token >= tokens.first
            return visible[None, :]
        visible = token[None, :] <= last[:, None]
        if before is not None:
            visible &= token[None, :] > before[:, None]
        return visible

    sections = key_sections, value_sections

    def load(trip: jax.Array) -> TokenTile:
        start = walk_start + trip * tile_tokens
        return load_tokens(o, tokens, start, *sections, variant)

    def load_whole(trip: jax.Array) -> TokenTile:
        # Of a range that begins with the first token.
        start = trip * tile_tokens
        return load_tokens(o, tokens, start, *sections, variant, is_whole=True)

    dot = functools.partial(_dot, variant)

    def attend_tile(
        trip: jax.Array, tile: TokenTile, sums: TileSums, *, masked: bool
    ) -> TileSums:
        start = walk_start + trip * tile_tokens
        keys, values = tile.keys, tile.values
        scores = dot(queries[0], keys[0], transpose=True)
        for query, key in zip(queries[1:], keys[1:], strict=True):
            scores += dot(query, key, transpose=True)
        factor = scale if tile.key_scales is None else scale * tile.key_scales[None, :]
        scores = _cap_in_log2(scores * factor, variant.soft_cap)
        visible = see(start + jnp.arange(tile_tokens, dtype=jnp.int32))
        if masked:
            scores = jnp.where(visible, scores, HIDDEN)
        maximum = jnp.maximum(sums.maximum, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - maximum[:, None])
        may_see_nothing = window is not None or variant.num_pieces
        if masked and not variant.is_decode and may_see_nothing:
            # A row may see nothing of a tile, and its maximum may still be HIDDEN.
            weights = jnp.where(visible, weights, 0.0)
        shrink = jnp.exp2(sums.maximum - maximum)
        total = sums.total * shrink + jnp.sum(weights, axis=1)
        if tile.value_scales is not None:
            weights *= tile.value_scales[None, :]
        weights = weights.astype(variant.weight_dtype)
        summed = tuple(
            old * shrink[:, None] + dot(weights, value)
            for old, value in zip(sums.values, values, strict=True)
        )
        return TileSums(maximum, total, summed)

    sink = None
    if o.sinks is not None:
        sink = backend.load_masked(o.sinks, (clamp_index(head, num_heads),), valid)
    sums = start_sums(index.shape, value_sections, sink)
    num_tiles = lax.div(
        tokens.end - walk_start + (tile_tokens - 1), jnp.int32(tile_tokens)
    )
    num_full = jnp.int32(0)
    if variant.tile.has_full_loop and window is None:
        # Tiles that every row sees as a whole come first and need no mask.
        seen_by_all = jnp.clip(find_last(position) + 1, 0, tokens.end)
        num_full = lax.div(seen_by_all, jnp.int32(tile_tokens))
        sums = lax.fori_loop(
            jnp.int32(0),
            num_full,
            lambda trip, sums: attend_tile(trip, load_whole(trip), sums, masked=False),
            sums,
        )
    if variant.tile.is_carried:
        # The next tile is on its way while this one is used: one wait a trip.
        def attend_carried(
            trip: jax.Array, carry: tuple[TileSums, TokenTile]
        ) -> tuple[TileSums, TokenTile]:
            sums, stored = carry
            following = load(jnp.minimum(trip + 1, num_tiles - 1))
            tile = to_operands(stored, len(value_sections), variant)
            return attend_tile(trip, tile, sums, masked=True), following

        carry = (sums, load(num_full))
        sums, _ = lax.fori_loop(num_full, num_tiles, attend_carried, carry)
    else:
        sums = lax.fori_loop(
            num_full,
            num_tiles,
            lambda trip, sums: attend_tile(trip, load(trip), sums, masked=True),
            sums,
        )

    # Stores are never clamped: two of them would share an address.
    total = jnp.where(sums.total > 0.0, sums.total, 1.0)  # rows that are not stored
    if variant.num_pieces:
        row = row * variant.num_pieces + piece
    row = jnp.broadcast_to(entry, index.shape) if variant.is_decode else row
    for (start, size), value in zip(value_sections, sums.values, strict=True):
        where = (row[:, None], head[:, None], columns_of(start, size))
        value = (value / total[:, None]).astype(output_ref.dtype)
        backend.store_masked(output_ref, where, value, over_section(valid, size))
    lse = sums.maximum + jnp.log2(total)
    lse = lse if variant.is_partial else lse * LN2
    backend.store_masked(lse_ref, (row, head), lse, valid)


def _cap_in_log2(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Apply `c * tanh(x / c)` by way of exp2, and the factor log2(e) with it."""
    if soft_cap is None:
        return scores
    power = jnp.exp2(scores * (2.0 * LOG2E / soft_cap))
    return soft_cap * LOG2E * (1.0 - 2.0 / (power + 1.0))


def _dot(
    variant: Variant, one: jax.Array, other: jax.Array, *, transpose: bool = False
) -> jax.Array:
    """Multiply tiles into float32; float32 operands are not rounded, or hardly."""
    is_split = variant.tile.is_split and not variant.interpret
    return lax.dot_general(
        one,
        other,
        (((1,), (1 if transpose else 0,)), ((), ())),
        precision=lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        if is_split
        else lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
