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
# Four elements of one byte, the first in the lowest: whole registers, of which each
# byte of a word is taken by one instruction.
WORD = jnp.dtype(jnp.int32)


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


def words_to_operand(
    words: jax.Array,
    kv_dtype: np.dtype[Any] | None,
    dtype: np.dtype[Any],
    *,
    interpret: bool,
) -> jax.Array:
    """Return the numbers that four bytes of each word mean, as `to_operand` does.

    Args:
      words: i32[..., D / 4], the first element in the lowest byte.
      kv_dtype: what the bytes mean.
      dtype: float32, bfloat16 or float16; at least as precise as the elements.
      interpret: whether the kernel is interpreted.

    Returns:
      [..., D].
    """

    def convert(byte: int) -> jax.Array:
        return _byte_to_operand(words, byte, kv_dtype, dtype, interpret=interpret)

    # In the order of the columns: the words, which half, which byte of the half.
    pairs = _join(convert(0), convert(2)), _join(convert(1), convert(3))
    return _join(*pairs).reshape(*words.shape[:-1], 4 * words.shape[-1])


def _byte_to_operand(
    words: jax.Array,
    byte: int,
    kv_dtype: np.dtype[Any] | None,
    dtype: np.dtype[Any],
    *,
    interpret: bool,
) -> jax.Array:
    # The byte in front, with its sign.
    high = words << (24 - 8 * byte)
    if interpret:
        stored = jnp.int8 if kv_dtype == jnp.int8 else jnp.uint8
        tile = _bitcast((high >> 24).astype(jnp.int8), stored)
        return to_operand(tile, kv_dtype, dtype, interpret=True)
    if kv_dtype == _E5M2:
        # Two numbers of float16: of the upper bytes of both halves of a word.
        pair = (words if byte % 2 else words << 8) & jnp.int32(0xFF00FF00 - 2**32)
        half = (pair >> 16 if byte > 1 else pair).astype(jnp.uint16)
        numbers = lax.bitcast_convert_type(half, jnp.float16)
        return _narrow(numbers.astype(jnp.float32), dtype)
    if kv_dtype in _E4M3:
        shift, mask, factor = _E4M3[kv_dtype]
        bits = (high >> (24 - shift)) & jnp.int32(mask - 2**32)
        return _narrow(lax.bitcast_convert_type(bits, jnp.float32) * factor, dtype)
    return _narrow((high >> 24).astype(jnp.float32), dtype)


def _join(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return [..., 2]."""
    return lax.concatenate([one[..., None], other[..., None]], one.ndim)


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
