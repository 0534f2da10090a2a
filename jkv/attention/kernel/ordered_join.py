"""Joining within a program: partial results that other programs have stored.

One piece is added after another, so how many are loaded at a time changes no bit.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.kernel.sums import HIDDEN, LN2, TileSums

# Partial results that are weighed against each other at a time.
_GROUP = 8

# What a piece left, by its index: the log2 of its sums, and a value for each section.
LoadLse = Callable[[jax.Array], jax.Array]
LoadValues = Callable[[jax.Array], list[jax.Array]]


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
