"""Operations in the form that costs XLA least, and rounds nothing on the way."""

import jax
import jax.numpy as jnp
from jax import lax


def multiply(equation: str, one: jax.Array, other: jax.Array) -> jax.Array:
    """Return an `einsum` whose float32 operands are not rounded."""
    return jnp.einsum(equation, one, other, precision=lax.Precision.HIGHEST)


def cap_scores(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Return `c * tanh(scores / c)`, or the scores without a cap."""
    if soft_cap is None:
        return scores
    return soft_cap * jnp.tanh(scores / soft_cap)


def gather(array: jax.Array, *index: jax.Array) -> jax.Array:
    """Return `array[*index]`; an index out of range is clamped, below zero too.

    Plain indexing wraps and fills instead: four more operations to compile each time.
    """
    return array.at[index].get(mode="clip", wrap_negative_indices=False)


def quotient(number: jax.Array, size: int) -> jax.Array:
    """Return `number // size`, neither of them negative.

    The operator rounds down below zero too, with seven more operations.
    """
    return lax.div(number, jnp.int32(size))


def divide_up(number: jax.Array, size: int) -> jax.Array:
    """Return how many parts of a size hold a number that is not negative."""
    return quotient(number + (size - 1), size)
