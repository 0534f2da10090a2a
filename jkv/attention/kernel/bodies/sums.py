"""Softmax sums of the kernels, in units of log2 for the hardware's exp2."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.attention.kernel.elements.sections import MIN_SIZE, Section

# The maximum of no scores, and the log2 of no sum; finite, so exp2(-inf - HIDDEN) is 0.
HIDDEN = -3e38


LOG2E = math.log2(math.e)


LN2 = math.log(2.0)


# An extra section of ones: the sum of weights, to correct values with a common offset.
ONES = Section(0, MIN_SIZE)


class TileSums(NamedTuple):
    """Softmax sums over the tokens so far, all f32. `...` is the rows of a tile."""

    maximum: jax.Array  # [...], in units of log2
    total: jax.Array  # [...]
    values: tuple[
        jax.Array, ...
    ]  # [..., size] for each section of the value head dim, ONES


def start_sums(
    shape: tuple[int, ...], sections: list[Section], sink: jax.Array | None
) -> TileSums:
    """Return the sums over no tokens; a sink is a token with the value zero."""
    values = tuple(jnp.zeros((*shape, each.size), jnp.float32) for each in sections)
    if sink is not None:
        # A maximum with NaN may return either operand; no score is less than -inf.
        sink = jnp.where(sink * LOG2E < HIDDEN, HIDDEN, sink * LOG2E)
        return TileSums(sink, jnp.ones(shape, jnp.float32), values)
    maximum = jnp.full(shape, HIDDEN, jnp.float32)
    return TileSums(maximum, jnp.zeros(shape, jnp.float32), values)
