"""The kernel of the queries' gradient: tiles of rows over their visible tokens.

The loops of the attention kernel, with weights recomputed from the log-sum-exp
(FlashAttention-2, arXiv 2307.08691): only the gradient's sums are carried. A one-row
request is a tile, too.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import Cotangents
from jkv.attention.kernel import backend
from jkv.attention.kernel.bodies.isolation import between, take_between
from jkv.attention.kernel.bodies.loads import (
    Operands,
    find_nan,
    load_numbers,
    load_rows,
)
from jkv.attention.kernel.bodies.rows import QueryRows, locate_rows
from jkv.attention.kernel.bodies.scores import (
    add_dot,
    cap_in_log2,
    dot_sections,
    slope_of_cap,
)
from jkv.attention.kernel.bodies.sums import LOG2E
from jkv.attention.kernel.bodies.walk import Walk, start_walk
from jkv.attention.kernel.tiles.variant import Variant


def differentiate_queries(
    operands: Operands,
    cotangents: Cotangents,
    before: jax.Array,
    d_queries_ref: jax.Array,
    *,
    variant: Variant,
) -> None:
    """Replace rows of f32[R, H, D], aliased to `before`.

    Writes the cotangent of the scaled queries. A row with any NaN becomes NaN in all
    columns.
    """
    del before
    weighed = _start_walk(operands, cotangents, locate_rows(operands, variant), variant)
    sums = _walk_tiles(weighed)
    added = functools.reduce(jnp.add, [jnp.sum(each, axis=1) for each in sums])
    is_number = (added == added)[:, None]
    sums = tuple(jnp.where(is_number, each, jnp.nan) for each in sums)
    _store(weighed.walk, sums, d_queries_ref)


def isolate_queries(
    operands: Operands,
    cotangents: Cotangents,
    before: jax.Array,
    d_queries_ref: jax.Array,
    *,
    variant: Variant,
) -> None:
    """Recompute rows that are NaN only because of masked keys (`isolation.py`)."""
    rows = locate_rows(operands, variant)
    is_nan = find_nan(before, rows.row, rows.head, rows.valid)

    def isolate(_: jax.Array, __: None) -> None:
        weighed = _start_walk(operands, cotangents, rows, variant)
        walk = weighed.walk._replace(valid=weighed.walk.valid & is_nan)

        def take(before: jax.Array, behind: jax.Array) -> None:
            part = between(walk, before, behind)
            _store(part, _walk_tiles(weighed._replace(walk=part)), d_queries_ref)

        take_between(walk, take, of_keys=True)

    times = jnp.max(is_nan.astype(jnp.int32))
    lax.fori_loop(jnp.int32(0), times, isolate, None)


class _Cotangents(NamedTuple):
    """A walk with the cotangents of its rows."""

    walk: Walk
    d_output: list[jax.Array]  # [rows, size] for each section of the values
    lse: jax.Array  # f32[rows], log2
    delta: jax.Array  # f32[rows]


def _start_walk(
    o: Operands, cotangents: Cotangents, rows: QueryRows, variant: Variant
) -> _Cotangents:
    walk = start_walk(o, variant, rows)
    where, dtype = (rows.row, rows.head, walk.valid), variant.weight_dtype
    return _Cotangents(
        walk,
        d_output=[
            load_rows(cotangents.d_output, *where, each, dtype)
            for each in walk.value_sections
        ],
        lse=load_numbers(cotangents.lse, *where) * LOG2E,
        delta=load_numbers(cotangents.delta, *where),
    )


def _walk_tiles(weighed: _Cotangents) -> tuple[jax.Array, ...]:
    """Return the gradient, f32[rows, size] for each section of the keys."""
    walk, d_output, lse, delta = weighed
    variant, tokens, size = walk.variant, walk.tokens, walk.variant.tile.tokens
    scale = walk.scale
    dot = functools.partial(dot_sections, variant)

    def add_tile(trip: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tile = walk.load(trip)
        factor = scale if tile.key_scales is None else scale * tile.key_scales[None, :]
        scores = dot(walk.queries, tile.keys) * factor
        scores = cap_in_log2(scores, variant.soft_cap)
        weights = jnp.exp2(scores - lse[:, None])
        d_weights = dot(d_output, tile.values)
        if tile.value_scales is not None:
            d_weights *= tile.value_scales[None, :]
        d_scores = weights * (d_weights - delta[:, None])
        if variant.soft_cap is not None:
            d_scores *= slope_of_cap(scores, variant.soft_cap)
        if tile.key_scales is not None:
            d_scores *= tile.key_scales[None, :]
        # Masked tokens may be NaN, and 0 * NaN is NaN.
        d_scores = jnp.where(walk.is_visible(trip), d_scores, 0.0)
        d_scores = d_scores.astype(variant.operand_dtype)
        return tuple(
            add_dot(variant, old, d_scores, key)
            for old, key in zip(sums, tile.keys, strict=True)
        )

    shape = walk.rows.row.shape
    sums = tuple(jnp.zeros((*shape, s.size), jnp.float32) for s in walk.key_sections)
    num_tiles = lax.div(tokens.end - walk.start + (size - 1), jnp.int32(size))
    return lax.fori_loop(jnp.int32(0), num_tiles, add_tile, sums)


def _store(walk: Walk, sums: tuple[jax.Array, ...], d_queries_ref: jax.Array) -> None:
    # Stores are not clamped, as two of them must not share an address.
    row, head = walk.rows.row, walk.rows.head
    for section, value in zip(walk.key_sections, sums, strict=True):
        where = (row[:, None], head[:, None], section.columns)
        backend.store_masked(d_queries_ref, where, value, section.over(walk.valid))
