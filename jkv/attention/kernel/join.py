"""The joining kernel: from partial results of pieces to the rows they belong to.

Joining in plain JAX takes atomics, which are not deterministic, or memory for every
request times every piece.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.kernel import backend
from jkv.attention.kernel.lists import Pieces
from jkv.attention.kernel.sections import cut
from jkv.attention.kernel.sums import HIDDEN, LN2, TileSums, start_sums

# Partial results that are weighed against each other at a time. Sums are taken in their
# order, one piece after the other, so that how many are loaded at a time, and by how
# many warps, changes no bit.
_GROUP = 8
# Groups that are loaded at a time, by one warp and by several: contexts in so many
# pieces would wait for one trip after the other.
_FEW_GROUPS, _MANY_GROUPS, _WARPS_FOR_MANY = 1, 4, 4


# Values that one warp holds of each; twice as many spill on Hopper.
_MAX_WARP_DIM = 256

# What a piece left, by its index: the log2 of its sums, and a value for each section.
LoadLse = Callable[[jax.Array], jax.Array]
LoadValues = Callable[[jax.Array], list[jax.Array]]


def join_pieces(
    pieces: Pieces,
    sinks: jax.Array | None,  # f32[H]
    partial: jax.Array,  # f32[W, H, Dv]
    partial_lse: jax.Array,  # f32[W, H], log2
    dtype: jax.typing.DTypeLike,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] and the log-sum-exp f32[R, H]; no piece, no output."""
    num_rows, (num_entries, num_heads, value_dim) = pieces.first.shape[0], partial.shape
    num_warps = 1 if value_dim <= _MAX_WARP_DIM else 2
    num_groups = _FEW_GROUPS
    if num_entries > 2 * _GROUP * num_rows:
        num_groups, num_warps = _MANY_GROUPS, num_warps * _WARPS_FOR_MANY
    output, lse = backend.launch(
        "jkv_join",
        functools.partial(_join_kernel, num_loaded=num_groups * _GROUP),
        (pieces, sinks, partial, partial_lse),
        (
            jax.ShapeDtypeStruct((num_rows, num_heads, value_dim), dtype),
            jax.ShapeDtypeStruct((num_rows, num_heads), jnp.float32),
        ),
        grid=(num_rows, num_heads),
        compilation=backend.Compilation(num_warps, 1, interpret),
    )
    return output, lse


def _join_kernel(
    pieces: Pieces,  # i32[R] each
    sinks_ref: jax.Array | None,  # f32[H]
    partial_ref: jax.Array,  # f32[W, H, Dv]
    partial_lse_ref: jax.Array,  # f32[W, H], log2
    output_ref: jax.Array,  # [R, H, Dv]
    lse_ref: jax.Array,  # f32[R, H]
    *,
    num_loaded: int,
) -> None:
    """Join the partial results of one row and head.

    A row that sees nothing is zeros: it has no pieces, or none with a token for it.
    """
    row, head = backend.program_id(0), backend.program_id(1)
    value_sections = cut(partial_ref.shape[2])

    def load_values(piece: jax.Array) -> list[jax.Array]:
        # What two sections have is the same in both.
        return [
            partial_ref[piece, head, section.columns[0]] for section in value_sections
        ]

    joined = join_range(
        (pieces.first[row], pieces.end[row]),
        lambda piece: partial_lse_ref[piece, head],
        load_values,
        start_sums((), value_sections, None if sinks_ref is None else sinks_ref[head]),
        num_loaded=num_loaded,
    )
    for section, value in zip(value_sections, joined.values, strict=True):
        output_ref[row, head, section.columns[0]] = value.astype(output_ref.dtype)
    lse_ref[row, head] = joined.lse


class Joined(NamedTuple):
    """What a row is. `...` is its heads, as in the sums."""

    values: list[jax.Array]  # f32[..., size] for each section; zeros: it sees nothing
    lse: jax.Array  # f32[...], the natural logarithm; -inf: it sees nothing


def join_range(
    pieces: tuple[jax.Array, jax.Array],  # i32[], the first one and past the last
    load_lse: LoadLse,
    load_values: LoadValues,
    sums: TileSums,
    *,
    num_loaded: int,
) -> Joined:
    """Join the pieces of a row from the first to the last.

    Args:
      pieces: of the row.
      load_lse: f32[...] of a piece, log2.
      load_values: f32[..., size] of a piece, for each section.
      sums: over no piece yet.
      num_loaded: pieces whose values are loaded before the first of them is used.
    """
    first, end = pieces
    num_trip = max(num_loaded, _GROUP)

    def join(
        trip: jax.Array, carry: tuple[jax.Array, TileSums]
    ) -> tuple[jax.Array, TileSums]:
        highest, sums = carry
        ids = [first + trip * num_trip + number for number in range(num_trip)]
        lses = [
            jnp.where(piece < end, load_lse(jnp.minimum(piece, end - 1)), HIDDEN)
            for piece in ids
        ]
        loaded: list[list[jax.Array]] = []
        for start in range(0, num_trip, _GROUP):
            weights, highest, sums = _weigh(lses[start : start + _GROUP], highest, sums)
            summed: list[jax.Array] = []
            for number, weight in enumerate(weights, start):
                if number == len(loaded):
                    following = ids[number : number + num_loaded]
                    loaded += [load_values(jnp.minimum(x, end - 1)) for x in following]
                values = [weight[..., None] * each for each in loaded[number]]
                summed = list(map(jnp.add, summed, values)) if summed else values
            sums = sums._replace(values=tuple(map(jnp.add, sums.values, summed)))
        return highest, sums

    trips = lax.div(end - first + (num_trip - 1), jnp.int32(num_trip))
    highest = jnp.full(sums.total.shape, HIDDEN, jnp.float32)
    highest, sums = lax.fori_loop(jnp.int32(0), trips, join, (highest, sums))
    return _finish(highest, sums)


def join_one(lse: jax.Array, values: list[jax.Array], sums: TileSums) -> Joined:
    """Return what `join_range` makes of a row's only piece."""
    (weight,), highest, sums = _weigh([lse], jnp.full_like(lse, HIDDEN), sums)
    summed = (weight[..., None] * value for value in values)
    return _finish(
        highest, sums._replace(values=tuple(map(jnp.add, sums.values, summed)))
    )


def _weigh(
    lses: list[jax.Array], highest: jax.Array, sums: TileSums
) -> tuple[list[jax.Array], jax.Array, TileSums]:
    """Return the weights of pieces, and sums that are ready for their values."""
    for lse in lses:
        highest = jnp.maximum(highest, lse)
    maximum = jnp.maximum(sums.maximum, highest)
    weights = [jnp.exp2(lse - maximum) for lse in lses]
    shrink = jnp.exp2(sums.maximum - maximum)
    total = sums.total * shrink + functools.reduce(jnp.add, weights)
    values = tuple(value * shrink[..., None] for value in sums.values)
    return weights, highest, TileSums(maximum, total, values)


def _finish(highest: jax.Array, sums: TileSums) -> Joined:
    has_any = highest > HIDDEN
    total = jnp.where(has_any, sums.total, 1.0)
    values = [
        jnp.where(has_any[..., None], value / total[..., None], 0.0)
        for value in sums.values
    ]
    lse = (sums.maximum + jnp.log2(total)) * LN2
    return Joined(values, jnp.where(has_any, lse, -jnp.inf))
