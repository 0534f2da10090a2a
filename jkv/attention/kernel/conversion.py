"""Stored elements to operands of a dot, inside the kernel.

fp8 is taken apart by its bits: what Triton offers depends on the card (none of e4m3fn
before sm_89) and JAX does not let e4m3fnuz through at all. The bits of e5m2 are the
upper half of float16's. Those of e4m3 are float32's, shifted, up to a power of two:
three integer instructions and one factor, whatever the card. How many there are
matters: at the bandwidth of an MI300X or H200 there is time for about five per element.

Interpreted, the numbers are converted as XLA does it: a processor may take the small
ones for zero, which are subnormal numbers of float32 until they are multiplied.
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
_E4M3 = {
    jnp.dtype(jnp.float8_e4m3fn): (20, 0x87F00000, 2.0**120),
    jnp.dtype(jnp.float8_e4m3fnuz): (20, 0x87F00000, 2.0**119),
}


_E5M2 = jnp.dtype(jnp.float8_e5m2)


def to_operand(
    tile: jax.Array,
    kv_dtype: np.dtype[Any] | None,
    dtype: np.dtype[Any],
    *,
    interpret: bool,
) -> jax.Array:
    """Return the numbers that stored elements mean, in a dtype that holds them exactly.

    Args:
      tile: elements as loaded; NaN of e4m3 comes out as some number.
      kv_dtype: what raw bits mean.
      dtype: float32, bfloat16 or float16; at least as precise as the elements.
      interpret: whether the kernel is interpreted.
    """
    if kv_dtype is None or tile.dtype not in MEANINGS:
        kv_dtype = tile.dtype
    if kv_dtype == _E5M2 and not interpret:
        half = _bitcast(tile, jnp.uint8).astype(jnp.uint16) << 8
        numbers = lax.bitcast_convert_type(half, jnp.float16)
        return _narrow(numbers.astype(jnp.float32), dtype)
    if kv_dtype in _E4M3 and not interpret:
        shift, mask, factor = _E4M3[kv_dtype]
        bits = _bitcast(tile, jnp.int8).astype(jnp.int32) << shift
        bits &= jnp.int32(mask - 2**32)
        numbers = lax.bitcast_convert_type(bits, jnp.float32) * factor
        return _narrow(numbers, dtype)
    if tile.dtype == jnp.int8:
        return _narrow(tile.astype(jnp.float32), dtype)
    return _bitcast(tile, kv_dtype).astype(dtype)


def round_by_bits(numbers: jax.Array) -> jax.Array:
    """Round f32 to bfloat16, what lies halfway away from zero.

    On cards without an instruction for it the compiler's way takes five: to the even
    neighbour, and NaN apart. This takes an addition, and one to pack two results.
    """
    bits = lax.bitcast_convert_type(numbers, jnp.uint32) + jnp.uint32(1 << 15)
    return _upper_half(bits)


def _bitcast(tile: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return tile if tile.dtype == dtype else lax.bitcast_convert_type(tile, dtype)


def _narrow(numbers: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Convert f32 that `dtype` holds exactly: bfloat16 is then its upper half."""
    if dtype != jnp.bfloat16:
        return numbers.astype(dtype)
    return _upper_half(lax.bitcast_convert_type(numbers, jnp.uint32))


def _upper_half(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
