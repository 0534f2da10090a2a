"""Rounding of rows to one-byte elements and scales, in the kernel that stores rows.

Bit-identical to XLA's on CPUs; see `jkv.formats.scaled` for GPUs. Operations that
differ between compilers are done on bits: Triton's float32 division may be off by two
units in the last place, and only some GPUs convert to fp8.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.formats.scaled import SMALLEST_SCALE, largest_number, over_largest

# Of float32.
_DIGITS, _BIAS = 23, 127
_INFINITY = 0x7F800000
_BFLOAT16_NAN = 0x7FC0


class RoundedRow(NamedTuple):
    """The stored parts of a row."""

    scale: jax.Array  # u16[], the bits of a bfloat16
    elements: list[jax.Array]  # i8[D] or u8[D], by section


def round_row(
    # float[D], the row's columns; some may be repeated
    sections: list[jax.Array],
    dtype: np.dtype[Any],  # of the elements, one byte
) -> RoundedRow:
    """Quantize a row, like `scaled.round_rows`."""
    rows = [section.astype(jnp.float32) for section in sections]
    bits = [lax.bitcast_convert_type(row, jnp.int32) for row in rows]
    magnitudes = [each & jnp.int32(0x7FFFFFFF) for each in bits]
    largest = jnp.max(magnitudes[0])
    for each in magnitudes[1:]:
        largest = jnp.maximum(largest, jnp.max(each))
    is_finite = largest < _INFINITY
    scale = _find_scale(largest, dtype)
    inverse, limit = invert(scale), jnp.float32(largest_number(dtype))
    elements = []
    for each, own in zip(magnitudes, bits, strict=True):
        # Rounding would clamp to the limit, too; the minimum keeps the compiler from
        # fusing the product with the following addition.
        scaled = lax.bitcast_convert_type(each, jnp.float32) * inverse
        numbers = _round_to(jnp.minimum(scaled, limit), own < 0, dtype)
        numbers = jnp.where(is_finite, numbers, jnp.int32(0))
        elements.append(numbers.astype(jnp.int8 if dtype == jnp.int8 else jnp.uint8))
    stored = jnp.where(is_finite, scale >> 16, jnp.int32(_BFLOAT16_NAN))
    return RoundedRow(stored.astype(jnp.uint16), elements)


def _find_scale(largest: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Return the bits of a finite row's scale as float32, i32[]."""
    factor = jnp.float32(over_largest(dtype))
    scale = lax.bitcast_convert_type(largest, jnp.float32) * factor
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    smallest = int(np.float32(SMALLEST_SCALE).view(np.int32))
    bits = jnp.maximum(bits, jnp.int32(smallest)) + jnp.int32(0xFFFF)
    return bits & jnp.int32(-(1 << 16))


def invert(
    # i32[], the bits of a float32 with 8 significant bits, from 2**-126 to 2**121
    scale: jax.Array,
) -> jax.Array:
    """Return the inverse of a scale, f32[], rounded to nearest.

    With its 8 significant bits as an integer m, the inverse is 2**31 / m, rounded,
    times a power of two; for m a power of two the highest bit carries to the exponent.
    """
    digits = ((scale >> 16) & 0x7F) | 0x80
    digits = digits.astype(jnp.uint32)
    quotient = ((digits >> 1) + jnp.uint32(1 << 31)) // digits
    exponent = jnp.int32(2 * _BIAS - 2) - (scale >> _DIGITS)
    bits = (exponent << _DIGITS) + quotient.astype(jnp.int32)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _round_to(
    magnitudes: jax.Array, is_negative: jax.Array, dtype: np.dtype[Any]
) -> jax.Array:
    """Round f32[...], nonnegative and in range, to elements as i32[...]."""
    if dtype == jnp.int8:
        numbers = _count_units(magnitudes, 1.0)
        return jnp.where(is_negative, -numbers, numbers)
    format = jnp.finfo(dtype)
    smallest = float(format.smallest_normal)
    # Round to even at the last bit that is kept; the carry may reach the exponent.
    dropped = _DIGITS - format.nmant
    bits = lax.bitcast_convert_type(magnitudes, jnp.int32)
    half = ((bits >> dropped) & 1) + jnp.int32((1 << (dropped - 1)) - 1)
    bias = 1 - int(np.log2(smallest))
    normal = ((bits + half) >> dropped) - ((_BIAS - bias) << format.nmant)
    # Subnormal numbers are multiples of one unit.
    small = _count_units(magnitudes, float(format.smallest_subnormal))
    numbers = jnp.where(magnitudes < smallest, small, normal)
    if dtype == jnp.float8_e4m3fnuz:
        is_negative &= numbers != 0  # the bits of a negative zero are NaN
    return jnp.where(is_negative, numbers | 0x80, numbers)


def _count_units(magnitudes: jax.Array, unit: float) -> jax.Array:
    """Divide by the unit and round to even, i32[...]; results must be below 2**22."""
    ones = np.float32(unit * 2.0**_DIGITS)  # its last place is one unit
    bits = lax.bitcast_convert_type(magnitudes + ones, jnp.int32)
    return bits - jnp.int32(int(ones.view(np.int32)))
