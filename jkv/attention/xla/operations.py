"""Operations in the form that costs XLA least, and rounds nothing on the way."""

import jax
import jax.numpy as jnp
from jax import lax


def multiply(equation: str, one: jax.Array, other: jax.Array) -> jax.Array:
    """Return an `einsum` whose float32 operands are not rounded."""
    return jnp.einsum(equation, one, other, precision=lax.Precision.HIGHEST)


def set_broken_apart(
    tokens: jax.Array,  # f32[..., D]
    used: jax.Array,  # bool, to broadcast to `tokens`
) -> tuple[jax.Array, jax.Array]:
    """Return vectors with zeros for NaN, infinity and what is not used, and marks.

    A product adds up with weights of 0 what a row does not see, and 0 * NaN is NaN. So
    broken numbers are taken out of it, and the mark of their token goes into its score:
    what is not seen of the scores is masked. The marks, f32[...], are NaN for a vector
    with a broken number, else 0.
    """
    is_sound = jnp.isfinite(tokens)
    marks = jnp.where(is_sound.all(axis=-1), 0.0, jnp.nan)
    return jnp.where(is_sound & used, tokens, 0.0), marks


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
