"""Numbers and the bits that they are kept as: one table, read both ways."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Meaning -> dtype of the array that holds it. XLA on CPU up to jaxlib 0.11.1 turns a
# whole bfloat16 array into float32 and back on every scatter, and still does so with
# fp8; the same bits as unsigned integers are updated in place by every version and
# backend, so they are stored that way.
STORED_AS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(jnp.float32): np.dtype(jnp.float32),
    np.dtype(jnp.float16): np.dtype(jnp.float16),
    np.dtype(jnp.bfloat16): np.dtype(jnp.uint16),
    np.dtype(jnp.int8): np.dtype(jnp.int8),
    np.dtype(jnp.float8_e4m3fn): np.dtype(jnp.uint8),
    np.dtype(jnp.float8_e4m3fnuz): np.dtype(jnp.uint8),
    np.dtype(jnp.float8_e5m2): np.dtype(jnp.uint8),
}

# Dtypes that do not say by themselves what they hold.
RAW_BITS = frozenset(bits for meaning, bits in STORED_AS.items() if bits != meaning)


def as_stored(numbers: jax.Array) -> jax.Array:
    """Return the bits of numbers as arrays keep them."""
    return as_bits(numbers, STORED_AS[np.dtype(numbers.dtype)])


def as_bits(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Return an array as another dtype of that many bits has it."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def to_float32(stored: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Turn what is stored into float32; `dtype` says what raw bits mean."""
    if stored.dtype in RAW_BITS:
        stored = lax.bitcast_convert_type(stored, dtype)
    return stored.astype(jnp.float32)
