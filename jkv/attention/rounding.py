"""Rows of keys and values to one-byte elements and scales, as XLA computes them.

A scale for each token and kv head: the largest magnitude of the row over the largest
number of the dtype, as bfloat16, rounded up. The rows are multiplied by the inverse of
the rounded scale: nothing exceeds the range, and at most 0.8% of it is not used.
`kernel/rounding.py` has the same bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.attention.elements import SCALE_DTYPE, largest_number

# A row of zeros has this scale; nothing smaller is kept apart from zero.
SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)


def round_rows(rows: jax.Array, dtype: np.dtype[Any]) -> tuple[jax.Array, jax.Array]:
    """Return the elements of rows, and their scales.

    Args:
      rows: float[..., D].
      dtype: of the elements, one byte.

    Returns:
      The elements, [..., D], and their scales, bfloat16[...], NaN for a row with NaN or
      infinity in it, whose elements are zeros.
    """
    rows = rows.astype(jnp.float32)
    # Of numbers without a sign the larger one has the larger bits, NaN above infinity.
    # XLA's largest float on a CPU passes over NaN from 4,096 numbers on (0.10 to 0.12).
    magnitudes = lax.bitcast_convert_type(rows, jnp.int32) & jnp.int32(0x7FFFFFFF)
    largest = lax.bitcast_convert_type(jnp.max(magnitudes, axis=-1), jnp.float32)
    scales = round_up(jnp.maximum(largest * over_largest(dtype), SMALLEST_SCALE))
    # Infinity over infinity is NaN, for which int8 has no number.
    scales = jnp.where(jnp.isfinite(largest), scales, jnp.asarray(jnp.nan, SCALE_DTYPE))
    # XLA for CPUs makes this of a division, XLA for GPUs does not.
    rows = rows * (1.0 / scales.astype(jnp.float32))[..., None]
    rows = jnp.where(jnp.isnan(rows), 0.0, rows)
    if dtype == jnp.int8:
        rows = jnp.round(rows)
    return rows.astype(dtype), scales


def over_largest(dtype: np.dtype[Any]) -> np.float32:
    """Return what a row's largest magnitude is multiplied by to be its scale.

    XLA makes this product of a division by a constant.
    """
    return np.float32(1) / np.float32(largest_number(dtype))


def round_up(scales: jax.Array) -> jax.Array:
    """Round f32[...], positive, to the next bfloat16 that is not smaller."""
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    bits = (bits + jnp.uint32(0xFFFF)) >> jnp.uint32(16)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
