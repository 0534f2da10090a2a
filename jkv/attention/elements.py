"""What the elements of keys and values mean, and the bits that they are kept as.

One table, read both ways. It depends on nothing else here, so that the room
that makes the pools takes it from the one that reads them.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# One number of any integer type. No `jax.typing.ArrayLike`, which takes floats.
Integer: TypeAlias = (
    jax.Array | np.ndarray[Any, np.dtype[np.integer[Any]]] | np.integer[Any] | int
)

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


# The inverse for raw bits, whose dtype alone does not say what they mean.
MEANINGS: dict[np.dtype[Any], tuple[np.dtype[Any], ...]] = {
    bits: tuple(meaning for meaning in STORED_AS if STORED_AS[meaning] == bits)
    for meaning, bits in STORED_AS.items()
    if meaning != bits
}


# The scales of a group's elements, one for each token and kv head, are another array.
SCALE_DTYPE = np.dtype(jnp.bfloat16)
SCALE_NAMES = {"key_pool": "key_scales", "value_pool": "value_scales"}

# One byte an element: scales per token and kv head may stand beside them, and must
# beside int8, which means nothing without.
ONE_BYTE_DTYPES = tuple(meaning for meaning in STORED_AS if meaning.itemsize == 1)


def largest_number(dtype: np.dtype[Any]) -> float:
    """Return the largest number of a one-byte dtype: 127, 448, 240 or 57344."""
    if dtype == jnp.int8:
        return 127.0
    return float(jnp.finfo(dtype).max)


def to_float32(
    stored: jax.Array, kv_dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Turn stored elements into float32; `kv_dtype` says what raw bits mean."""
    if kv_dtype is not None and stored.dtype in MEANINGS:
        stored = lax.bitcast_convert_type(stored, kv_dtype)
    return stored.astype(jnp.float32)
