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

A number that is not finite stays with the rows that see it. A score that is NaN makes
the row's sum of weights NaN, whatever a card's maximum makes of it. To a value that it
does not see a row gives no weight, but 0 * NaN is NaN: such rows of a tile are NaN as a
whole here, and `isolation.py` takes them up.
"""

import functools

import jax
import jax.numpy as jnp

from jkv.attention.kernel import backend
from jkv.attention.kernel.bodies.loads import Operands
from jkv.attention.kernel.bodies.rows import QueryRows, locate_rows
from jkv.attention.kernel.bodies.sums import HIDDEN, LN2, TileSums
from jkv.attention.kernel.bodies.walk import Walk, start_walk, walk_tiles
from jkv.attention.kernel.tiles.variant import Variant
from jkv.attention.kernel.work.lists import SharedLanes


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
    walk = start_walk(operands, variant, locate_rows(operands, variant))
    sums = walk_tiles(walk)
    store_means(walk, sums if variant.is_decode else _spread_nan(sums), output_ref)
    where = find_places(operands, walk.rows, variant), walk.rows.head
    lse = _find_lse(walk, sums) * (1.0 if variant.is_partial else LN2)
    backend.store_masked(lse_ref, where, lse, walk.valid)


def store_means(walk: Walk, sums: TileSums, output_ref: jax.Array) -> None:
    """Store the weighted means of the values."""
    # Stores are never clamped: two of them would share an address.
    row, head = find_places(walk.operands, walk.rows, walk.variant), walk.rows.head
    means = _find_means(walk, sums)
    for section, value in zip(walk.value_sections, means, strict=True):
        where = (row[:, None], head[:, None], section.columns)
        value = value.astype(output_ref.dtype)
        backend.store_masked(output_ref, where, value, section.over(walk.valid))


def find_places(o: Operands, rows: QueryRows, variant: Variant) -> jax.Array:
    """Return where each row is stored, i32[rows]."""
    if isinstance(o.lanes, SharedLanes):
        return o.lanes.place[rows.entry, rows.offset]
    if variant.is_decode:
        return jnp.broadcast_to(rows.entry, rows.head.shape)
    if variant.num_pieces:
        return rows.row * variant.num_pieces + rows.piece
    return rows.row


def _spread_nan(sums: TileSums) -> TileSums:
    """Return sums in which no row has a total that has NaN among its values.

    Infinities of both signs may be taken for it.
    """
    added = functools.reduce(jnp.add, [jnp.sum(each, axis=1) for each in sums.values])
    return sums._replace(total=jnp.where(added == added, sums.total, added))


def _find_means(walk: Walk, sums: TileSums) -> list[jax.Array]:
    """Return the weighted means of the values, f32[rows, size] for each section.

    Where all scores are -inf there is none, but NaN, unless other pieces have one.
    """
    total = sums.total
    if walk.variant.is_partial:
        total = jnp.where(total == 0.0, 1.0, total)
    values, above = list(sums.values), walk.variant.values_above
    if above:  # of which all columns of the ones have the same sum
        too_much = above * jnp.max(values.pop(), axis=1)[:, None]
        values = [value - too_much for value in values]
    return [value / total[:, None] for value in values]


def _find_lse(walk: Walk, sums: TileSums) -> jax.Array:
    """Return the log2 of the sums of weights, f32[rows]; HIDDEN where a piece is none.

    It is -inf where a row sees tokens, but all scores are -inf.
    """
    lse, tokens = sums.maximum + jnp.log2(sums.total), walk.tokens
    if not walk.variant.is_partial:
        return lse
    first, last = tokens.first, tokens.end - 1
    if walk.seen is not None:
        first, last = walk.seen.bound(first, tokens.end)
    return jnp.where(first <= last, lse, HIDDEN)
