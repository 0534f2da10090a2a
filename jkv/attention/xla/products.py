"""The arithmetic of scores and sums, in float32 throughout."""

import jax
import jax.numpy as jnp
from jax import lax


def multiply(equation: str, one: jax.Array, other: jax.Array) -> jax.Array:
    """Return an `einsum` that rounds no operand on its way to the hardware."""
    return jnp.einsum(equation, one, other, precision=lax.Precision.HIGHEST)


def cap_scores(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Return `c * tanh(scores / c)`, or the scores without a cap."""
    if soft_cap is None:
        return scores
    return soft_cap * jnp.tanh(scores / soft_cap)
