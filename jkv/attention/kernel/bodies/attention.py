"""The attention kernel, with one body for decoding and prefill.

A program processes a tile of query rows of one request and kv head over a range of the
request's tokens, with online softmax (arXiv 2205.14135), reading the pool directly. In
decoding the ranges are pieces of contexts, and a program returns a normalized partial
result in float32 with its log-sum-exp.

The Triton lowering has these requirements: operands are passed whole and indexed in the
kernel (pool, layer and tables are not sliced or gathered outside); tiles are powers of
two, so the query heads of a kv head are padded and head dims are cut into powers of
two; shifts and masks replace divisions.

Tokens are clamped into the visible range, so unwritten slots are never loaded, and only
scores need a mask. Scores include a factor log2(e), for the hardware's exp2.

A non-finite number must only affect rows that attend to its token. A NaN score makes
the row's sum of weights NaN on every GPU. A masked value has weight 0, but 0 * NaN is
NaN: such rows become NaN in all columns here, and `isolation.py` recomputes them.
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

    Decoding and `by_position` write partial results, f32[W, H, Dv] and log2 sums
    f32[W, H], with W = R * pieces for the latter. Prefill replaces rows of [R, H, Dv]
    and f32[R, H] in place, by aliasing.
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
    # Stores are not clamped, as two of them must not share an address.
    row, head = find_places(walk.operands, walk.rows, walk.variant), walk.rows.head
    means = _find_means(walk, sums)
    for section, value in zip(walk.value_sections, means, strict=True):
        where = (row[:, None], head[:, None], section.columns)
        value = value.astype(output_ref.dtype)
        backend.store_masked(output_ref, where, value, section.over(walk.valid))


def find_places(o: Operands, rows: QueryRows, variant: Variant) -> jax.Array:
    """Return the output row of each row, i32[rows]."""
    if isinstance(o.lanes, SharedLanes):
        return o.lanes.place[rows.entry, rows.offset]
    if variant.is_decode:
        return jnp.broadcast_to(rows.entry, rows.head.shape)
    if variant.num_pieces:
        return rows.row * variant.num_pieces + rows.piece
    return rows.row


def _spread_nan(sums: TileSums) -> TileSums:
    """Set the total to NaN in rows with a NaN in any value.

    Infinities of both signs add up to NaN as well.
    """
    added = functools.reduce(jnp.add, [jnp.sum(each, axis=1) for each in sums.values])
    return sums._replace(total=jnp.where(added == added, sums.total, added))


def _find_means(walk: Walk, sums: TileSums) -> list[jax.Array]:
    """Return the weighted means of the values, f32[rows, size] for each section.

    A row with only -inf scores is NaN, unless other pieces have finite ones.
    """
    total = sums.total
    if walk.variant.is_partial:
        total = jnp.where(total == 0.0, 1.0, total)
    values, above = list(sums.values), walk.variant.values_above
    if above:  # all columns of ONES hold the same sum
        too_much = above * jnp.max(values.pop(), axis=1)[:, None]
        values = [value - too_much for value in values]
    return [value / total[:, None] for value in values]


def _find_lse(walk: Walk, sums: TileSums) -> jax.Array:
    """Return the log2 of the sums of weights, f32[rows]; HIDDEN for an empty piece.

    A row with visible tokens and only -inf scores returns -inf.
    """
    lse, tokens = sums.maximum + jnp.log2(sums.total), walk.tokens
    if not walk.variant.is_partial:
        return lse
    first, last = tokens.first, tokens.end - 1
    if walk.seen is not None:
        first, last = walk.seen.bound(first, tokens.end)
    return jnp.where(first <= last, lse, HIDDEN)
