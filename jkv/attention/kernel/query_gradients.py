"""The kernel of the queries' derivative: tiles of rows, each over what it sees.

The loops of the forward kernel (`body.py`), with the weights computed anew from the
log-sum-exp (FlashAttention-2, arXiv 2307.08691): no sums are carried but those of the
gradient itself. A request of one row is a tile, too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.attention.derivative import Cotangents
from jkv.attention.kernel import backend
from jkv.attention.kernel.loads import (
    Operands,
    Range,
    cut_alike,
    find_term_dtype,
    load_numbers,
    load_rows,
    load_tokens,
)
from jkv.attention.kernel.rows import (
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
    hide_one,
    slope_of_cap,
)
from jkv.attention.kernel.sections import Section
from jkv.attention.kernel.sums import LOG2E
from jkv.attention.kernel.variant import Variant


def differentiate_queries(
    operands: Operands,
    cotangents: Cotangents,
    before: jax.Array,
    d_queries_ref: jax.Array,
    *,
    variant: Variant,
) -> None:
    """Replace the rows of f32[R, H, D], which aliases the array before.

    What is written is the cotangent of the scaled queries.
    """
    del before
    o = operands
    # Of scores, whose products sum over the head dims, and of the gradient.
    size, outer_size = variant.tile.inner_section, variant.tile.outer_section
    sections = cut_alike(o.queries, o.values, variant, size)
    key_sections, value_sections = sections
    outer_sections, _ = cut_alike(o.queries, o.values, variant, outer_size)
    rows = locate_rows(o, variant)
    window = read_window(o)
    first, end = find_range(o, rows, window, variant)
    seen = find_seen(o, rows, window, variant)
    row, head, valid = rows.row, rows.head, seen.valid

    def load(
        array: jax.Array, sections: list[Section], dtype: np.dtype[Any]
    ) -> list[jax.Array]:
        dtype = find_term_dtype(array.dtype, dtype, variant)
        return [load_rows(array, row, head, valid, each, dtype) for each in sections]

    queries = load(o.queries, key_sections, variant.operand_dtype)
    d_output = load(cotangents.d_output, value_sections, variant.weight_dtype)
    lse = load_numbers(cotangents.lse, row, head, valid) * LOG2E
    delta = load_numbers(cotangents.delta, row, head, valid)

    # The walk starts at a multiple of the tile, so that a tile lies in one block.
    tokens = Range(
        layer=jnp.clip(o.layer[0], 0, o.keys.shape[0] - 1),
        table=o.work.table[rows.entry],
        kv_head=rows.kv_head,
        first=first,
        end=end,
    )
    once = hide_one(end)
    tile_tokens = variant.tile.tokens
    walk_start = first & -tile_tokens
    scale = o.scale[0] * (LOG2E if variant.soft_cap is None else 1.0)

    def add_tile(trip: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = walk_start + trip * tile_tokens
        tile = load_tokens(o, tokens, start, *sections, variant)
        factor = scale if tile.key_scales is None else scale * tile.key_scales[None, :]
        scores = dot_sections(variant, queries, tile.keys, once) * factor
        scores = cap_in_log2(scores, variant.soft_cap)
        visible = see(seen, start + jnp.arange(tile_tokens, dtype=jnp.int32))
        weights = jnp.where(visible, jnp.exp2(scores - lse[:, None]), 0.0)
        d_weights = dot_sections(variant, d_output, tile.values, once)
        if tile.value_scales is not None:
            d_weights *= tile.value_scales[None, :]
        d_scores = weights * (d_weights - delta[:, None])
        if variant.soft_cap is not None:
            d_scores *= slope_of_cap(scores, variant.soft_cap)
        if tile.key_scales is not None:
            d_scores *= tile.key_scales[None, :]
        d_scores = d_scores.astype(variant.operand_dtype)
        if outer_size != size:
            tile = load_tokens(o, tokens, start, outer_sections, [], variant)
        return tuple(
            add_dot(variant, old, d_scores, key, once)
            for old, key in zip(sums, tile.keys, strict=True)
        )

    sums = tuple(jnp.zeros((*row.shape, s.size), jnp.float32) for s in outer_sections)
    num_tiles = lax.div(end - walk_start + (tile_tokens - 1), jnp.int32(tile_tokens))
    sums = lax.fori_loop(jnp.int32(0), num_tiles, add_tile, sums)

    # Stores are never clamped: two of them would share an address.
    for section, value in zip(outer_sections, sums, strict=True):
        where = (row[:, None], head[:, None], section.columns)
        backend.store_masked(d_queries_ref, where, value, section.over(valid))
