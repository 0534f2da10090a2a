"""Joining within a program: partial results that other programs have stored.

One piece is added after another, in their order, whichever program joins.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.kernel.sums import HIDDEN, LN2, TileSums

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
      num_loaded: pieces that are loaded, and weighed against each other, at a time.
    """
    first, end = pieces

    def join(
        trip: jax.Array, carry: tuple[jax.Array, TileSums]
    ) -> tuple[jax.Array, TileSums]:
        highest, sums = carry
        ids = [first + trip * num_loaded + number for number in range(num_loaded)]
        places = [jnp.minimum(piece, end - 1) for piece in ids]
        lses = [
            jnp.where(piece < end, load_lse(place), HIDDEN)
            for piece, place in zip(ids, places, strict=True)
        ]
        values = [load_values(place) for place in places]
        return _add(lses, values, highest, sums)

    trips = lax.div(end - first + (num_loaded - 1), jnp.int32(num_loaded))
    highest = jnp.full(sums.total.shape, HIDDEN, jnp.float32)
    highest, sums = lax.fori_loop(jnp.int32(0), trips, join, (highest, sums))
    return _finish(highest, sums)


def join_one(lse: jax.Array, values: list[jax.Array], sums: TileSums) -> Joined:
    """Return what `join_range` makes of a row's only piece."""
    return _finish(*_add([lse], [values], jnp.full_like(lse, HIDDEN), sums))


def _add(
    lses: list[jax.Array],
    values: list[list[jax.Array]],  # of each piece
    highest: jax.Array,
    sums: TileSums,
) -> tuple[jax.Array, TileSums]:
    """Add pieces to the highest sum that there was and to the sums."""
    for lse in lses:
        highest = jnp.maximum(highest, lse)
    maximum = jnp.maximum(sums.maximum, highest)
    weights = [jnp.exp2(lse - maximum) for lse in lses]
    shrink = jnp.exp2(sums.maximum - maximum)
    total = sums.total * shrink + functools.reduce(jnp.add, weights)
    summed = [value * shrink[..., None] for value in sums.values]
    for weight, piece in zip(weights, values, strict=True):
        weighted = [weight[..., None] * each for each in piece]
        summed = list(map(jnp.add, summed, weighted))
    return highest, TileSums(maximum, total, tuple(summed))


def _finish(highest: jax.Array, sums: TileSums) -> Joined:
    has_any = highest > HIDDEN
    total = jnp.where(has_any, sums.total, 1.0)
    values = [
        jnp.where(has_any[..., None], value / total[..., None], 0.0)
        for value in sums.values
    ]
    lse = (sums.maximum + jnp.log2(total)) * LN2
    return Joined(values, jnp.where(has_any, lse, -jnp.inf))
