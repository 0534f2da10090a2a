"""Rows of one-byte elements with a scale for each token and kv head: int8 and fp8.

The scale is the row's largest magnitude divided by the largest number of the dtype, as
bfloat16, rounded up. Rows are multiplied by the inverse of the rounded scale, so
nothing overflows, and at most 0.8% of the range is unused.

`attention/kernel/elements/rounding.py` does the same in the kernel that stores rows,
bit-identical on CPUs. On GPUs the scales are equal, but an element at the midpoint of
two numbers, within float32 precision, may be rounded to either, one unit apart (on an
H100 3 of 49,920 were in int8, and 28 to 42 in fp8, drawn at such midpoints).

A row is quantized once, when it is written. A scale per block would grow with later
tokens and require requantizing the block; a static scale needs calibration, and fails
on data unlike the calibration set. The cost is 2 bytes per row.

(vLLM scales per tensor, or as here per token and head with float32 scales, its pull
request 38378. KIVI, arXiv 2402.02750, quantizes keys per channel to 2 bits, which needs
groups of complete tokens.)
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.formats.format import (
    STORED_AS,
    Element,
    Format,
    Parts,
    as_stored,
    to_float32,
    without_derivative,
)

SCALE_DTYPE = np.dtype(jnp.bfloat16)

# The scale of a row of zeros, and the smallest one.
SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Scaled(Format):
    """One-byte elements with a scale for each row."""

    is_quantized: ClassVar[bool] = True

    def arrays(self, width: int) -> dict[str, Element]:
        return {
            "pool": Element((width,), self.stored_as, self.dtype),
            "scales": Element((), STORED_AS[SCALE_DTYPE], SCALE_DTYPE),
        }

    def prepare(self, rows: jax.Array) -> jax.Array:
        """Convert rows to at most 32 bits per number."""
        rows = without_derivative(rows, self.dtype.name)
        is_narrow = rows.dtype in (jnp.float16, jnp.bfloat16)
        return rows if is_narrow else rows.astype(jnp.float32)

    def put(self, rows: jax.Array) -> Parts:
        """Encode rows; a row with NaN or infinity decodes to NaN."""
        elements, scales = round_rows(rows, self.dtype)
        return {"pool": as_stored(elements), "scales": as_stored(scales)}

    def get(self, stored: Parts) -> tuple[jax.Array, jax.Array | None]:
        """Return the elements in float32, and the scales as factors."""
        elements = to_float32(stored["pool"], self.dtype)
        return elements, to_float32(stored["scales"], SCALE_DTYPE)


def round_rows(rows: jax.Array, dtype: np.dtype[Any]) -> tuple[jax.Array, jax.Array]:
    """Quantize rows, float[..., D]; return one-byte elements and bfloat16[...] scales.

    A row with NaN or infinity has the scale NaN and elements of zero.
    """
    rows, scales = scale_rows(rows.astype(jnp.float32), over_largest(dtype))
    if dtype == jnp.int8:
        rows = jnp.round(rows)
    return rows.astype(dtype), scales


def scale_rows(
    rows: jax.Array, over_largest: np.float32
) -> tuple[jax.Array, jax.Array]:
    """Divide rows, f32[..., D], by their scales, bfloat16[...]; return both."""
    # Magnitudes are compared as integers, with NaN above infinity: XLA's float maximum
    # on CPU ignores NaN from 4,096 numbers on (0.10 to 0.12).
    magnitudes = lax.bitcast_convert_type(rows, jnp.int32) & jnp.int32(0x7FFFFFFF)
    largest = lax.bitcast_convert_type(jnp.max(magnitudes, axis=-1), jnp.float32)
    scales = round_up(jnp.maximum(largest * over_largest, SMALLEST_SCALE))
    # Infinity over infinity is NaN, which int8 cannot represent.
    scales = jnp.where(jnp.isfinite(largest), scales, jnp.asarray(jnp.nan, SCALE_DTYPE))
    # A division would be compiled to this on CPUs, but not on GPUs.
    rows = rows * (1.0 / scales.astype(jnp.float32))[..., None]
    return jnp.where(jnp.isnan(rows), 0.0, rows), scales


def count_units_apart(
    one: np.ndarray[Any, Any],  # elements as pools store them, i8[...] or u8[...]
    other: np.ndarray[Any, Any],
    dtype: np.dtype[Any],
) -> np.ndarray[Any, Any]:
    """Return the distance of elements in numbers of the dtype, i32[...].

    On GPUs it is at most 1 between rows quantized by the kernel and by XLA.
    """
    first, second = (_find_place(array, dtype) for array in (one, other))
    return np.abs(first - second)


def _find_place(
    elements: np.ndarray[Any, Any], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Return the signed rank of each element among the numbers, i32[...]."""
    places = elements.astype(np.int32)
    if dtype == jnp.int8:
        return places
    return np.where(places & 0x80, -(places & 0x7F), places)


def largest_number(dtype: np.dtype[Any]) -> float:
    """Return the largest finite number of a one-byte dtype: 127, 448, 240 or 57344."""
    if dtype == jnp.int8:
        return 127.0
    return float(jnp.finfo(dtype).max)


def over_largest(dtype: np.dtype[Any]) -> np.float32:
    """Return the factor from a row's largest magnitude to its scale."""
    return np.float32(1) / np.float32(largest_number(dtype))


def round_up(scales: jax.Array) -> jax.Array:
    """Round f32[...], positive, up to bfloat16."""
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    bits = (bits + jnp.uint32(0xFFFF)) >> jnp.uint32(16)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
