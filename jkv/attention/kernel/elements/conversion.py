"""Bit-level conversions of numbers inside the kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
# Four one-byte elements, the first in the lowest byte: whole registers, from which one
# instruction extracts a byte.
WORD = jnp.dtype(jnp.int32)


def round_by_bits(numbers: jax.Array) -> jax.Array:
    """Round f32 to bfloat16, ties away from zero.

    On GPUs without an instruction for it, the compiler's rounding (ties to even, NaN
    preserved) takes five; this takes one addition, and one to pack two results.
    """
    bits = lax.bitcast_convert_type(numbers, jnp.uint32) + jnp.uint32(1 << 15)
    return _upper_half(bits)


def bitcast(tile: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Bitcast a tile to a dtype of the same size."""
    return tile if tile.dtype == dtype else lax.bitcast_convert_type(tile, dtype)


def narrow(numbers: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Convert f32 that is exact in `dtype`; bfloat16 is its upper half."""
    if dtype != jnp.bfloat16:
        return numbers.astype(dtype)
    return _upper_half(lax.bitcast_convert_type(numbers, jnp.uint32))


def _upper_half(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
