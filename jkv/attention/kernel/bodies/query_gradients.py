"""The kernel of the queries' derivative: tiles of rows, each over what it sees.

The loops of the kernel that attends, with the weights computed anew from the
log-sum-exp (FlashAttention-2, arXiv 2307.08691): no sums are carried but those of the
gradient itself. A request of one row is a tile, too.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.attention.derivative import Cotangents
from jkv.attention.kernel import backend
from jkv.attention.kernel.bodies.isolation import find_token, narrow, take_between
from jkv.attention.kernel.bodies.loads import (
    Operands,
    Range,
    TokenTile,
    cut_head_dims,
    find_broken,
    find_nan,
    load_numbers,
    load_rows,
    load_tokens,
)
from jkv.attention.kernel.bodies.rows import (
    QueryRows,
    Seen,
    find_range,
    find_seen,
    locate_rows,
    read_window,
    see,
)
from jkv.attention.kernel.bodies.scores import (
    add_dot,
    cap_in_log2,
    dot_sections,
    slope_of_cap,
)
from jkv.attention.kernel.bodies.sums import LOG2E
from jkv.attention.kernel.elements.sections import Section
from jkv.attention.kernel.tiles.variant import Variant


def differentiate_queries(
    operands: Operands,
    cotangents: Cotangents,
    before: jax.Array,
    d_queries_ref: jax.Array,
    *,
    variant: Variant,
) -> None:
    """Replace the rows of f32[R, H, D], which aliases the array before.

    What is written is the cotangent of the scaled queries. Rows that have any NaN are
    NaN as a whole.
    """
    del before
    walk = _start_walk(operands, cotangents, variant, locate_rows(operands, variant))
    sums = _walk_tiles(walk)
    added = functools.reduce(jnp.add, [jnp.sum(each, axis=1) for each in sums])
    is_number = (added == added)[:, None]
    sums = tuple(jnp.where(is_number, each, jnp.nan) for each in sums)
    _store(walk, sums, d_queries_ref)


def isolate_queries(
    operands: Operands,
    cotangents: Cotangents,
    before: jax.Array,
    d_queries_ref: jax.Array,
    *,
    variant: Variant,
) -> None:
    """Replace rows that are NaN for keys that they do not see (`isolation.py`)."""
    rows = locate_rows(operands, variant)
    is_nan = find_nan(before, rows.row, rows.head, rows.valid)

    def isolate(_: jax.Array, __: None) -> None:
        walk = _start_walk(operands, cotangents, variant, rows)

        def take(before: jax.Array, behind: jax.Array) -> None:
            valid = walk.valid & is_nan
            valid, tokens = narrow(valid, walk.seen, walk.tokens, before, behind)
            part = walk._replace(valid=valid, tokens=tokens)
            _store(part, _walk_tiles(part), d_queries_ref)

        find = functools.partial(_find_broken_key, walk)
        take_between(take, find, has_window=operands.window is not None)

    times = jnp.max(is_nan.astype(jnp.int32))
    lax.fori_loop(jnp.int32(0), times, isolate, None)


class _Walk(NamedTuple):
    """A tile of rows and the tokens that they are taken over."""

    operands: Operands
    variant: Variant
    rows: QueryRows
    valid: jax.Array  # bool[rows], those to store
    seen: Seen
    tokens: Range
    key_sections: list[Section]
    value_sections: list[Section]
    queries: list[jax.Array]  # [rows, size] for each section
    d_output: list[jax.Array]  # likewise of the values
    lse: jax.Array  # f32[rows], log2
    delta: jax.Array  # f32[rows]

    @property
    def start(self) -> jax.Array:
        """The first token of the first tile, so that a tile lies in one block."""
        return self.tokens.first & -self.variant.tile.tokens

    def load(self, trip: jax.Array) -> TokenTile:
        """Load a tile of the range."""
        start = self.start + trip * self.variant.tile.tokens
        sections = self.key_sections, self.value_sections
        return load_tokens(self.operands, self.tokens, start, *sections, self.variant)


def _start_walk(
    o: Operands, cotangents: Cotangents, variant: Variant, rows: QueryRows
) -> _Walk:
    key_sections, value_sections = cut_head_dims(o.queries, o.values, variant)
    window = read_window(o)
    first, end = find_range(o, rows, window, variant)
    seen = find_seen(o, rows, window, variant)
    where = rows.row, rows.head, seen.valid

    def load(
        array: jax.Array, sections: list[Section], dtype: np.dtype[Any]
    ) -> list[jax.Array]:
        return [load_rows(array, *where, each, dtype) for each in sections]

    return _Walk(
        operands=o,
        variant=variant,
        rows=rows,
        valid=seen.valid,
        seen=seen,
        tokens=Range(
            layer=jnp.clip(o.layer[0], 0, o.keys.shape[0] - 1),
            table=o.work.table[rows.entry],
            kv_head=rows.kv_head,
            first=first,
            end=end,
        ),
        key_sections=key_sections,
        value_sections=value_sections,
        queries=load(o.queries, key_sections, variant.operand_dtype),
        d_output=load(cotangents.d_output, value_sections, variant.weight_dtype),
        lse=load_numbers(cotangents.lse, *where) * LOG2E,
        delta=load_numbers(cotangents.delta, *where),
    )


def _walk_tiles(walk: _Walk) -> tuple[jax.Array, ...]:
    """Return the gradient, f32[rows, size] for each section of the keys."""
    variant, tokens, size = walk.variant, walk.tokens, walk.variant.tile.tokens
    scale = walk.operands.scale[0] * (LOG2E if variant.soft_cap is None else 1.0)
    dot = functools.partial(dot_sections, variant)

    def add_tile(trip: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tile = walk.load(trip)
        factor = scale if tile.key_scales is None else scale * tile.key_scales[None, :]
        scores = dot(walk.queries, tile.keys) * factor
        scores = cap_in_log2(scores, variant.soft_cap)
        weights = jnp.exp2(scores - walk.lse[:, None])
        d_weights = dot(walk.d_output, tile.values)
        if tile.value_scales is not None:
            d_weights *= tile.value_scales[None, :]
        d_scores = weights * (d_weights - walk.delta[:, None])
        if variant.soft_cap is not None:
            d_scores *= slope_of_cap(scores, variant.soft_cap)
        if tile.key_scales is not None:
            d_scores *= tile.key_scales[None, :]
        # What a row does not see may be NaN, and 0 * NaN is NaN.
        token = walk.start + trip * size + jnp.arange(size, dtype=jnp.int32)
        d_scores = jnp.where(see(walk.seen, token), d_scores, 0.0)
        d_scores = d_scores.astype(variant.operand_dtype)
        return tuple(
            add_dot(variant, old, d_scores, key)
            for old, key in zip(sums, tile.keys, strict=True)
        )

    shape = walk.rows.row.shape
    sums = tuple(jnp.zeros((*shape, s.size), jnp.float32) for s in walk.key_sections)
    num_tiles = lax.div(tokens.end - walk.start + (size - 1), jnp.int32(size))
    return lax.fori_loop(jnp.int32(0), num_tiles, add_tile, sums)


def _store(walk: _Walk, sums: tuple[jax.Array, ...], d_queries_ref: jax.Array) -> None:
    # Stores are never clamped: two of them would share an address.
    row, head = walk.rows.row, walk.rows.head
    for section, value in zip(walk.key_sections, sums, strict=True):
        where = (row[:, None], head[:, None], section.columns)
        backend.store_masked(d_queries_ref, where, value, section.over(walk.valid))


def _find_broken_key(walk: _Walk, before: jax.Array) -> jax.Array:
    """Return the next token behind one whose key is not finite, i32[]."""

    def is_broken(trip: jax.Array) -> jax.Array:
        tile = walk.load(trip)
        return find_broken(tile.keys, tile.key_scales)

    return find_token(is_broken, before, walk.tokens, walk.variant.tile.tokens)
