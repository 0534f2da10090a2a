"""Stored elements to operands of a dot, inside the kernel.

fp8 is taken apart by its bits: what Triton offers depends on the card (none of e4m3fn
before sm_89) and JAX does not let e4m3fnuz through at all. The bits of a small float
are those of float32, shifted, up to a power of two: three integer instructions and one
factor, whatever the card. How many there are matters: at the bandwidth of an MI300X or
H200 there is time for about five per element.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.attention.elements import MEANINGS

BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


# Sign, exponent and digits among the bits of float32 when the byte, sign-extended, is
# shifted left; and the factor missing, 2 to the difference of the exponents' biases.
_FP8 = {
    jnp.dtype(jnp.float8_e4m3fn): (20, 0x87F00000, 2.0**120),
    jnp.dtype(jnp.float8_e4m3fnuz): (20, 0x87F00000, 2.0**119),
    jnp.dtype(jnp.float8_e5m2): (21, 0x8FE00000, 2.0**112),
}


def to_operand(
    tile: jax.Array, kv_dtype: np.dtype[Any] | None, dtype: np.dtype[Any]
) -> jax.Array:
    """Return the numbers that stored elements mean, in a dtype that holds them exactly.

    Args:
      tile: elements as loaded; NaN of an fp8 dtype comes out as some number.
      kv_dtype: what raw bits mean.
      dtype: float32, bfloat16 or float16; at least as precise as the elements.
    """
    if kv_dtype is None or tile.dtype not in MEANINGS:
        kv_dtype = tile.dtype
    if kv_dtype in _FP8:
        shift, mask, factor = _FP8[kv_dtype]
        bits = _bitcast(tile, jnp.int8).astype(jnp.int32) << shift
        bits &= jnp.int32(mask - 2**32)
        numbers = lax.bitcast_convert_type(bits, jnp.float32) * factor
        return _narrow(numbers, dtype)
    if tile.dtype == jnp.int8:
        return _narrow(tile.astype(jnp.float32), dtype)
    return _bitcast(tile, kv_dtype).astype(dtype)


def _bitcast(tile: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return tile if tile.dtype == dtype else lax.bitcast_convert_type(tile, dtype)


def _narrow(numbers: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Convert f32 that `dtype` holds exactly: bfloat16 is then its upper half."""
    if dtype != jnp.bfloat16:
        return numbers.astype(dtype)
    bits = lax.bitcast_convert_type(numbers, jnp.uint32) >> 16
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
