"""Products and scores of the kernels, in units of log2 for the hardware's exp2."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.attention.kernel.bodies.sums import LOG2E
from jkv.attention.kernel.tiles.table import Techniques
from jkv.attention.kernel.tiles.variant import Variant


def cap_in_log2(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Return `c * tanh(x / c) * log2(e)`, computed by exp2.

    Without a cap the scale already includes the factor.
    """
    if soft_cap is None:
        return scores
    power = jnp.exp2(scores * (2.0 * LOG2E / soft_cap))
    return soft_cap * LOG2E * (1.0 - 2.0 / (power + 1.0))


# Minimax polynomial of degree four for 2^x on [-1/2, 1/2] with value 1 at 0: relative
# error at most 2.9e-6. Degree three (1.0e-4) would suffice for 16-bit weights, but not
# for the returned sums of weights.
_EXP2 = 0.00958285, 0.05590642, 0.24024099, 0.69312419, 1.0
# Adding it to a number below 2^22 leaves the nearest integer in the low bits.
_ROUNDER = 1.5 * 2.0**23
# As unsigned integers, bits of negative floats increase with their magnitude.
_LEAST = np.float32(-127.0).view(np.uint32)


def exp2_in_pairs(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Approximate 2^x for x <= 0 (f32), for 16-bit weights.

    CDNA adds and multiplies two float32 numbers per instruction; its own exp2 takes
    four times as long as an addition, and four more instructions if results may be
    subnormal. Numbers up to -127, and -inf, return 0. NaN returns NaN, or 0 if its sign
    bit is set.

    Args:
      x: f32[...].
      interpret: True in interpret mode, where XLA may optimize the rounding away.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    x = lax.bitcast_convert_type(jnp.minimum(bits, _LEAST), jnp.float32)
    if interpret:
        nearest = jnp.round(x)
        exponent = nearest.astype(jnp.int32)
    else:
        shifted = x + _ROUNDER
        nearest = shifted - _ROUNDER
        exponent = lax.bitcast_convert_type(shifted, jnp.int32)
    fraction = x - nearest
    power = jnp.full_like(x, _EXP2[0])
    for coefficient in _EXP2[1:]:
        power = power * fraction + coefficient
    # At -127 the power's exponent bits, 127, cancel out: the result is 0.
    power_bits = lax.bitcast_convert_type(power, jnp.int32) + (exponent << 23)
    return lax.bitcast_convert_type(power_bits, jnp.float32)


def slope_of_cap(capped: jax.Array, soft_cap: float) -> jax.Array:
    """Return the derivative of the cap from the result of `cap_in_log2`."""
    share = capped * (1.0 / (soft_cap * LOG2E))
    return 1.0 - share * share


def dot_sections(
    variant: Variant, ones: list[jax.Array], others: list[jax.Array]
) -> jax.Array:
    """Return the product of [m, D] and the transpose of [n, D], f32[m, n]."""
    total = jnp.zeros((ones[0].shape[0], others[0].shape[0]), jnp.float32)
    for one, other in zip(ones, others, strict=True):
        total = add_dot(variant, total, one, other, transpose=True)
    return total


def add_dot(
    variant: Variant,
    total: jax.Array,
    one: jax.Array,
    other: jax.Array,
    *,
    transpose: bool = False,
) -> jax.Array:
    """Add a product of tiles to f32[m, n], in full or 3xTF32 precision for float32."""
    precision: lax.PrecisionLike = lax.Precision.HIGHEST
    if Techniques.SPLIT in variant.tile.ways and not variant.interpret:
        precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return total + lax.dot_general(
        one,
        other,
        (((1,), (1 if transpose else 0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
