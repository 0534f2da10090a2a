"""A float32 number as three of bfloat16, for matrix instructions that take no wider.

Each term has the next eight of its 24 bits, cut off and not rounded: a mask and a
subtraction, both exact, and the largest float32 stays finite. A product of two numbers
is nine of terms (Henry, Tang, Heinecke, arXiv 1904.06376, who round instead). The
three smallest are left out: at most 2^-21 of the product, 2^-24 in the mean.
"""

import jax
import jax.numpy as jnp
from jax import lax

NUM_TERMS = 3


def split(numbers: jax.Array, zero: jax.Array | None = None) -> list[jax.Array]:
    """Cut numbers into terms of bfloat16, the largest first, whose sum they are.

    Args:
      numbers: f32[...], or bf16[...], which are their only term. Below 2^-103 the last
        terms are subnormal, and cards may take these for zero. Of infinite numbers the
        first term is infinite and the others are NaN; of NaN all are.
      zero: i32[], 0, but not to the compiler's knowledge: terms are made where it is.
    """
    if zero is not None:
        integer = jnp.int32 if numbers.dtype == jnp.float32 else jnp.int16
        bits = lax.bitcast_convert_type(numbers, integer) ^ zero.astype(integer)
        numbers = lax.bitcast_convert_type(bits, numbers.dtype)
    if numbers.dtype == jnp.bfloat16:
        return [numbers]
    terms = []
    for _ in range(NUM_TERMS):
        bits = lax.bitcast_convert_type(numbers, jnp.uint32)
        upper = (bits >> 16).astype(jnp.uint16)
        terms.append(lax.bitcast_convert_type(upper, jnp.bfloat16))
        cut = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        numbers -= cut
    return terms
