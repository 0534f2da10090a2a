"""Products and scores inside a kernel, in units of log2: the hardware has exp2."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.attention.kernel.bodies.sums import LOG2E
from jkv.attention.kernel.tiles.table import Ways
from jkv.attention.kernel.tiles.variant import Variant


def cap_in_log2(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Apply `c * tanh(x / c)` by way of exp2, and the factor log2(e) with it.

    Without a cap the factor is in the scale already.
    """
    if soft_cap is None:
        return scores
    power = jnp.exp2(scores * (2.0 * LOG2E / soft_cap))
    return soft_cap * LOG2E * (1.0 - 2.0 / (power + 1.0))


# The polynomial of fourth degree that is nearest to 2^x between -1/2 and 1/2 among
# those that are 1 at 0: relative errors are at most 2.9e-6. One of third degree would
# do for 16-bit weights (1.0e-4), but not for the sums of them that callers get.
_EXP2 = 0.00958285, 0.05590642, 0.24024099, 0.69312419, 1.0
# Added to a number of less than 2^22, it leaves the nearest integer in the last bits.
_ROUNDER = 1.5 * 2.0**23
# As integers without sign, the bits of negative numbers grow as they get smaller.
_LEAST = np.float32(-127.0).view(np.uint32)


def exp2_in_pairs(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Return 2^x of numbers that are not above 0 (f32), nearly, for 16-bit weights.

    CDNA has instructions that add and multiply two float32 numbers at once; its own
    exp2 takes four times as long as an addition, and four more instructions where
    results may be subnormal. What is not above -127 becomes 0, -inf too; of NaN it is
    NaN, unless its sign bit is set, which makes it one of these.

    Args:
      x: f32[...].
      interpret: whether the kernel is interpreted; what XLA compiles may leave out that
        a number is added and taken away again.
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
    # At -127 the power is 1, whose exponent has 127 among its bits: 0 is left.
    power_bits = lax.bitcast_convert_type(power, jnp.int32) + (exponent << 23)
    return lax.bitcast_convert_type(power_bits, jnp.float32)


def slope_of_cap(capped: jax.Array, soft_cap: float) -> jax.Array:
    """Return the derivative of the cap, from what `cap_in_log2` made of the scores."""
    share = capped * (1.0 / (soft_cap * LOG2E))
    return 1.0 - share * share


def dot_sections(
    variant: Variant, ones: list[jax.Array], others: list[jax.Array]
) -> jax.Array:
    """Multiply rows [m, D] and [n, D], both in sections, into f32[m, n]."""
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
    """Add a product of tiles to f32[m, n]; float32 is not rounded, or hardly."""
    precision: lax.PrecisionLike = lax.Precision.HIGHEST
    if Ways.SPLIT in variant.tile.ways and not variant.interpret:
        precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return total + lax.dot_general(
        one,
        other,
        (((1,), (1 if transpose else 0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
