"""Numbers to other dtypes by their bits, inside the kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
# Four elements of one byte, the first in the lowest: whole registers, of which each
# byte of a word is taken by one instruction.
WORD = jnp.dtype(jnp.int32)


def round_by_bits(numbers: jax.Array) -> jax.Array:
    """Round f32 to bfloat16, what lies halfway away from zero.

    On cards without an instruction for it the compiler's way takes five: to the even
    neighbour, and NaN apart. This takes an addition, and one to pack two results.
    """
    bits = lax.bitcast_convert_type(numbers, jnp.uint32) + jnp.uint32(1 << 15)
    return _upper_half(bits)


def bitcast(tile: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return a tile as another dtype of that many bits has it."""
    return tile if tile.dtype == dtype else lax.bitcast_convert_type(tile, dtype)


def narrow(numbers: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Convert f32 that `dtype` holds exactly: bfloat16 is then its upper half."""
    if dtype != jnp.bfloat16:
        return numbers.astype(dtype)
    return _upper_half(lax.bitcast_convert_type(numbers, jnp.uint32))


def _upper_half(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
