"""Softmax sums that are computed piecewise and joined in any order.

A softmax over scores x with values v is `values / total`, where `total` is the sum of
`exp(x - maximum)` and `values` that of `exp(x - maximum) * v`. The sums over two sets
of tokens join into the sums over both (online softmax, arXiv 1805.02867).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# In place of -inf: exp(HIDDEN - HIDDEN) is 1 instead of NaN, and sums of masked tokens
# vanish at the first visible one, as exp(HIDDEN - score) is 0.
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


class Sums(NamedTuple):
    """Softmax sums of rows, in float32. `...` are axes of rows and heads."""

    maximum: jax.Array  # f32[...]
    total: jax.Array  # f32[...]
    values: jax.Array  # f32[..., Dv]


def empty_sums(
    shape: tuple[int, ...],  # of the rows and heads
    value_dim: int,  # Dv
    # f32, of a shape that broadcasts to `shape` with equal rank, or None
    sinks: jax.Array | None,
) -> Sums:
    """Return the sums over no tokens; a sink is a logit with the value zero."""
    values = jnp.zeros((*shape, value_dim), jnp.float32)
    if sinks is None:
        maximum = jnp.full(shape, HIDDEN, jnp.float32)
        return Sums(maximum, jnp.zeros(shape, jnp.float32), values)
    maximum = jnp.broadcast_to(sinks, shape)
    return Sums(maximum, jnp.ones(shape, jnp.float32), values)


def join_sums(one: Sums, other: Sums) -> Sums:
    """Join the sums of two disjoint sets of tokens."""
    maximum = jnp.maximum(one.maximum, other.maximum)
    shrink_one = jnp.exp(one.maximum - maximum)
    shrink_other = jnp.exp(other.maximum - maximum)
    return Sums(
        maximum,
        one.total * shrink_one + other.total * shrink_other,
        one.values * shrink_one[..., None] + other.values * shrink_other[..., None],
    )


def finish_sums(
    sums: Sums,  # the sums over all tokens of each row
    sees: jax.Array,  # bool, rank of `sums.total`, True for rows with a visible token
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted means and the log-sum-exp; zeros for rows without tokens.

    A row with only -inf scores has no mean and is NaN.
    """
    total = jnp.where(sees, sums.total, 1.0)
    # A maximum of HIDDEN means that every score was -inf.
    mean = sums.values / jnp.where(sums.maximum > HIDDEN, total, jnp.nan)[..., None]
    output = jnp.where(sees[..., None], mean, 0.0)
    return output, jnp.where(sees, sums.maximum + jnp.log(total), -jnp.inf)


def join_parts(
    # f32[R, H, Dv], over the local tokens; zeros without any
    output: jax.Array,
    # f32[R, H], its log-sum-exp, -inf without local tokens
    lse: jax.Array,
    sinks: jax.Array | None,  # [H], one logit per head
    axis: str,  # of the mesh
) -> tuple[jax.Array, jax.Array]:
    """Join results over the devices of a mesh axis, f32[R, H, Dv] and f32[R, H].

    Must run inside `shard_map`. Adds each sink once.
    """
    # The shift cancels out, so it needs no derivative.
    highest = lax.pmax(lax.stop_gradient(lse), axis)
    sees = highest > -jnp.inf
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)[None]
        highest = jnp.maximum(highest, lax.stop_gradient(sinks))
    shift = jnp.where(sees, highest, 0.0)
    # One array, so that one collective sums both.
    weight = jnp.exp(lse - shift)[..., None]
    both = jnp.concatenate([weight * output, weight], axis=-1)
    both = lax.psum(both, axis)
    summed, total = both[..., :-1], both[..., -1]
    if sinks is not None:
        total += jnp.where(sees, jnp.exp(sinks - shift), 0.0)
    total = jnp.where(sees, total, 1.0)
    return summed / total[..., None], jnp.where(sees, shift + jnp.log(total), -jnp.inf)
