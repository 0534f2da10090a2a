"""Rows of one-byte elements with a scale for each token and kv head: int8 and fp8.

The scale is the largest magnitude of the row over the largest number of the dtype, as
bfloat16, rounded up. The rows are multiplied by the inverse of the rounded scale:
nothing exceeds the range, and at most 0.8% of it is not used.

`attention/kernel/elements/rounding.py` does the same in the kernel that stores rows: on
CPUs to the bit. On GPUs scales are the same, but an element that lies at the middle of
two numbers, to the precision of float32, may become either of them: it may be one unit
apart (on an H100 3 of 49,920 were in int8, and 28 to 42 in fp8, drawn at such places).

A row is quantized once, when it is written, and whatever is written later leaves it
alone. A scale per block would have to be raised whenever a larger token came, and the
block's earlier tokens rounded again. A scale fixed beforehand needs data to calibrate
it, and fails on what the data lacked. The price is 2 bytes beside the head dim's.

(vLLM scales per tensor, or as here per token and head with float32 scales, its pull
request 38378. KIVI, arXiv 2402.02750, quantizes keys per channel, to 2 bits, which
needs groups of tokens that no longer change.)
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

# A row of zeros has this scale; nothing smaller is kept apart from zero.
SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Scaled(Format):
    """Elements of one byte, and what each row of them is multiplied by."""

    is_quantized: ClassVar[bool] = True

    def arrays(self, width: int) -> dict[str, Element]:
        return {
            "pool": Element((width,), self.stored_as, self.dtype),
            "scales": Element((), STORED_AS[SCALE_DTYPE], SCALE_DTYPE),
        }

    def prepare(self, rows: jax.Array) -> jax.Array:
        """Return rows of at most 32 bits a number."""
        rows = without_derivative(rows, self.dtype.name)
        is_narrow = rows.dtype in (jnp.float16, jnp.bfloat16)
        return rows if is_narrow else rows.astype(jnp.float32)

    def put(self, rows: jax.Array) -> Parts:
        """Round; a row with NaN or infinity in it reads as NaN."""
        elements, scales = round_rows(rows, self.dtype)
        return {"pool": as_stored(elements), "scales": as_stored(scales)}

    def get(self, stored: Parts) -> tuple[jax.Array, jax.Array | None]:
        """Return the elements, and the scales as factors."""
        elements = to_float32(stored["pool"], self.dtype)
        return elements, to_float32(stored["scales"], SCALE_DTYPE)


def round_rows(rows: jax.Array, dtype: np.dtype[Any]) -> tuple[jax.Array, jax.Array]:
    """Return the elements of rows, float[..., D], of one byte each, and their scales.

    These are bfloat16[...], NaN for a row with NaN or infinity in it, whose elements
    are zeros.
    """
    rows, scales = scale_rows(rows.astype(jnp.float32), over_largest(dtype))
    if dtype == jnp.int8:
        rows = jnp.round(rows)
    return rows.astype(dtype), scales


def scale_rows(
    rows: jax.Array, over_largest: np.float32
) -> tuple[jax.Array, jax.Array]:
    """Return rows, f32[..., D], over their scales, and these, bfloat16[...]."""
    # Of numbers without a sign the larger one has the larger bits, NaN above infinity.
    # XLA's largest float on a CPU passes over NaN from 4,096 numbers on (0.10 to 0.12).
    magnitudes = lax.bitcast_convert_type(rows, jnp.int32) & jnp.int32(0x7FFFFFFF)
    largest = lax.bitcast_convert_type(jnp.max(magnitudes, axis=-1), jnp.float32)
    scales = round_up(jnp.maximum(largest * over_largest, SMALLEST_SCALE))
    # Infinity over infinity is NaN, for which int8 has no number.
    scales = jnp.where(jnp.isfinite(largest), scales, jnp.asarray(jnp.nan, SCALE_DTYPE))
    # XLA for CPUs makes this of a division, XLA for GPUs does not.
    rows = rows * (1.0 / scales.astype(jnp.float32))[..., None]
    return jnp.where(jnp.isnan(rows), 0.0, rows), scales


def count_units_apart(
    one: np.ndarray[Any, Any],  # elements as pools store them, i8[...] or u8[...]
    other: np.ndarray[Any, Any],
    dtype: np.dtype[Any],
) -> np.ndarray[Any, Any]:
    """Return how many numbers of the dtype lie from one element to another, i32[...].

    On GPUs that is at most 1 between rows that the kernel rounded and XLA's.
    """
    first, second = (_find_place(array, dtype) for array in (one, other))
    return np.abs(first - second)


def _find_place(
    elements: np.ndarray[Any, Any], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Return places in the order of the numbers, i32[...], 0 of zero."""
    places = elements.astype(np.int32)
    if dtype == jnp.int8:
        return places
    return np.where(places & 0x80, -(places & 0x7F), places)


def largest_number(dtype: np.dtype[Any]) -> float:
    """Return the largest number of a one-byte dtype: 127, 448, 240 or 57344."""
    if dtype == jnp.int8:
        return 127.0
    return float(jnp.finfo(dtype).max)


def over_largest(dtype: np.dtype[Any]) -> np.float32:
    """Return what a row's largest magnitude is multiplied by to be its scale."""
    return np.float32(1) / np.float32(largest_number(dtype))


def round_up(scales: jax.Array) -> jax.Array:
    """Round f32[...], positive, to the next bfloat16 that is not smaller."""
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    bits = (bits + jnp.uint32(0xFFFF)) >> jnp.uint32(16)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
