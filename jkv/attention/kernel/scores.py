"""Products and scores inside a kernel, in units of log2: the hardware has exp2."""

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.kernel.sums import LOG2E
from jkv.attention.kernel.variant import Variant


def cap_in_log2(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Apply `c * tanh(x / c)` by way of exp2, and the factor log2(e) with it.

    Without a cap the factor is in the scale already.
    """
    if soft_cap is None:
        return scores
    power = jnp.exp2(scores * (2.0 * LOG2E / soft_cap))
    return soft_cap * LOG2E * (1.0 - 2.0 / (power + 1.0))


def slope_of_cap(capped: jax.Array, soft_cap: float) -> jax.Array:
    """Return the derivative of the cap, from what `cap_in_log2` made of the scores."""
    share = capped * (1.0 / (soft_cap * LOG2E))
    return 1.0 - share * share


def dot(
    variant: Variant, one: jax.Array, other: jax.Array, *, transpose: bool = False
) -> jax.Array:
    """Multiply tiles into float32; float32 operands are not rounded, or hardly."""
    is_split = variant.tile.is_split and not variant.interpret
    return lax.dot_general(
        one,
        other,
        (((1,), (1 if transpose else 0,)), ((), ())),
        precision=lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        if is_split
        else lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def dot_sections(
    variant: Variant, ones: list[jax.Array], others: list[jax.Array]
) -> jax.Array:
    """Multiply rows [m, D] and [n, D], both in sections, into f32[m, n]."""
    total = dot(variant, ones[0], others[0], transpose=True)
    for one, other in zip(ones[1:], others[1:], strict=True):
        total += dot(variant, one, other, transpose=True)
    return total
