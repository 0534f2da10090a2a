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
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.kernel import backend
from jkv.attention.kernel.conversion import round_by_bits
from jkv.attention.kernel.loads import (
    Operands,
    Range,
    TokenTile,
    clamp_index,
    cut_head_dims,
    find_term_dtype,
    load_rows,
    load_tokens,
    to_operands,
)
from jkv.attention.kernel.rows import (
    QueryRows,
    find_last,
    find_range,
    find_seen,
    locate_rows,
    read_window,
    see,
)
from jkv.attention.kernel.scores import (
    add_dot,
    cap_in_log2,
    dot_sections,
    exp2_in_pairs,
    hide_one,
)
from jkv.attention.kernel.sections import Section
from jkv.attention.kernel.sums import HIDDEN, LN2, LOG2E, TileSums, start_sums
from jkv.attention.kernel.variant import Variant


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
    attended = attend_rows(operands, variant)
    rows, head, valid = attended.rows, attended.rows.head, attended.valid
    # Stores are never clamped: two of them would share an address.
    row = rows.row
    if variant.num_pieces:
        row = row * variant.num_pieces + rows.piece
    row = jnp.broadcast_to(rows.entry, head.shape) if variant.is_decode else row
    for section, value in zip(attended.sections, attended.values, strict=True):
        where = (row[:, None], head[:, None], section.columns)
        value = value.astype(output_ref.dtype)
        backend.store_masked(output_ref, where, value, section.over(valid))
    lse = attended.lse if variant.is_partial else attended.lse * LN2
    backend.store_masked(lse_ref, (row, head), lse, valid)


class Attended(NamedTuple):
    """What a tile of rows is, by the tokens of a range."""

    rows: QueryRows
    valid: jax.Array  # bool[rows], those to store
    sections: list[Section]  # of the value head dim
    values: list[jax.Array]  # f32[rows, size] for each section
    lse: jax.Array  # f32[rows], log2


def attend_rows(operands: Operands, variant: Variant) -> Attended:
    """Attend from this program's tile of rows to its range, and store nothing yet."""
    o, work = operands, operands.work
    num_heads = o.queries.shape[1]
    key_sections, value_sections = cut_head_dims(o.queries, o.values, variant)
    rows = locate_rows(o, variant)
    entry, row, head, valid = rows.entry, rows.row, rows.head, rows.valid
    window = read_window(o)
    first, end = find_range(o, rows, window, variant)
    seen = None
    if not variant.is_decode:
        seen = find_seen(o, rows, window, variant)
        valid = seen.valid
    dtype = find_term_dtype(o.queries.dtype, variant.operand_dtype, variant)
    queries = [
        load_rows(o.queries, row, head, valid, section, dtype)
        for section in key_sections
    ]

    # The walk starts at a multiple of the tile, so that a tile lies in one block.
    tokens = Range(
        layer=jnp.clip(o.layer[0], 0, o.keys.shape[0] - 1),
        table=work.table[entry],
        kv_head=rows.kv_head,
        first=first,
        end=end,
    )
    once = hide_one(tokens.end)
    tile_tokens = variant.tile.tokens
    walk_start = tokens.first & -tile_tokens
    scale = o.scale[0] * (LOG2E if variant.soft_cap is None else 1.0)
    # One factor for all scores, which is not negative, is left out of their maximum.
    has_one_factor = (
        variant.tile.has_exp2_in_pairs
        and variant.soft_cap is None
        and o.key_scales is None
    )
    if has_one_factor:
        queries = [jnp.where(scale < 0.0, -query, query) for query in queries]
        scale = jnp.abs(scale)

    def is_visible(token: jax.Array) -> jax.Array:
        """Return which rows see which tokens, to broadcast over the scores."""
        if seen is not None:
            return see(seen, token)
        visible = token < tokens.end
        if window is not None:
            visible &= token >= tokens.first
        return visible[None, :]

    sections = key_sections, value_sections

    def load(trip: jax.Array) -> TokenTile:
        start = walk_start + trip * tile_tokens
        return load_tokens(o, tokens, start, *sections, variant)

    def load_whole(trip: jax.Array) -> TokenTile:
        # Of a range that begins with the first token.
        start = trip * tile_tokens
        return load_tokens(o, tokens, start, *sections, variant, is_whole=True)

    exp2 = jnp.exp2
    if variant.tile.has_exp2_in_pairs:
        exp2 = functools.partial(exp2_in_pairs, interpret=variant.interpret)

    def attend_tile(
        trip: jax.Array,
        tile: TokenTile,
        sums: TileSums,
        *,
        masked: bool,
        stored: TokenTile | None = None,
    ) -> TileSums:
        start = walk_start + trip * tile_tokens
        scores = dot_sections(variant, queries, tile.keys, once)
        factor = scale if tile.key_scales is None else scale * tile.key_scales[None, :]
        largest = None
        if has_one_factor and not masked:
            largest = scale * jnp.max(scores, axis=1)
        scores = cap_in_log2(scores * factor, variant.soft_cap)
        visible = is_visible(start + jnp.arange(tile_tokens, dtype=jnp.int32))
        if masked:
            scores = jnp.where(visible, scores, HIDDEN)
        if largest is None:
            largest = jnp.max(scores, axis=1)
        maximum = jnp.maximum(sums.maximum, largest)
        weights = exp2(scores - maximum[:, None])
        may_see_nothing = window is not None or variant.num_pieces
        if masked and not variant.is_decode and may_see_nothing:
            # A row may see nothing of a tile, and its maximum may still be HIDDEN.
            weights = jnp.where(visible, weights, 0.0)
        shrink = jnp.exp2(sums.maximum - maximum)
        total = sums.total * shrink + jnp.sum(weights, axis=1)
        if stored is not None and variant.has_words:
            # Words become values as late as here: they take few registers till then.
            tile = to_operands(stored, len(value_sections), variant)
        if tile.value_scales is not None:
            weights *= tile.value_scales[None, :]
        if variant.tile.is_rounded_by_bits and variant.weight_dtype == jnp.bfloat16:
            weights = round_by_bits(weights)
        weights = weights.astype(variant.weight_dtype)
        summed = tuple(
            add_dot(variant, old * shrink[:, None], weights, value, once)
            for old, value in zip(sums.values, tile.values, strict=True)
        )
        return TileSums(maximum, total, summed)

    def attend_tiles(
        start: jax.Array,
        stop: jax.Array,
        sums: TileSums,
        load_next: Callable[[jax.Array], TokenTile],
        *,
        masked: bool,
    ) -> TileSums:
        def attend_loaded(trip: jax.Array, sums: TileSums) -> TileSums:
            return attend_tile(trip, load_next(trip), sums, masked=masked)

        # The next tile is on its way while this one is used: one wait a trip.
        def attend_carried(
            trip: jax.Array, carry: tuple[TileSums, TokenTile]
        ) -> tuple[TileSums, TokenTile]:
            sums, stored = carry
            following = load_next(jnp.minimum(trip + 1, stop - 1))
            tile = to_operands(stored, len(value_sections), variant)
            sums = attend_tile(trip, tile, sums, masked=masked, stored=stored)
            return sums, following

        if not variant.tile.is_carried:
            return lax.fori_loop(start, stop, attend_loaded, sums)
        # Of no tiles the first one lies in the range only where it is clamped.
        return lax.fori_loop(start, stop, attend_carried, (sums, load(start)))[0]

    sink = None
    if o.sinks is not None:
        sink = backend.load_masked(o.sinks, (clamp_index(head, num_heads),), valid)
    sums = start_sums(head.shape, value_sections, sink)
    num_tiles = lax.div(
        tokens.end - walk_start + (tile_tokens - 1), jnp.int32(tile_tokens)
    )
    num_full = jnp.int32(0)
    if variant.tile.has_full_loop and window is None:
        # Tiles that every row sees as a whole come first and need no mask.
        seen_by_all = jnp.clip(find_last(o, rows.position, variant) + 1, 0, tokens.end)
        num_full = lax.div(seen_by_all, jnp.int32(tile_tokens))
        sums = attend_tiles(jnp.int32(0), num_full, sums, load_whole, masked=False)
    sums = attend_tiles(num_full, num_tiles, sums, load, masked=True)

    total = jnp.where(sums.total > 0.0, sums.total, 1.0)  # rows that are not stored
    values = [value / total[:, None] for value in sums.values]
    lse = sums.maximum + jnp.log2(total)
    return Attended(rows, valid, value_sections, values, lse)
