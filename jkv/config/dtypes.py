"""What the elements of keys and values mean, and how their bits are stored."""

from typing import Any

import jax.numpy as jnp
import numpy as np

# What the bits of a stored element are kept as. XLA on CPU up to jaxlib 0.11.1 turns a
# whole bfloat16 array into float32 and back on every scatter, and still does so with
# fp8; the same bits as unsigned integers are updated in place by every version and
# backend, so they are stored that way.
STORAGE_DTYPES = {
    np.dtype(jnp.float32): np.dtype(jnp.float32),
    np.dtype(jnp.float16): np.dtype(jnp.float16),
    np.dtype(jnp.bfloat16): np.dtype(jnp.uint16),
    np.dtype(jnp.int8): np.dtype(jnp.int8),
    np.dtype(jnp.float8_e4m3fn): np.dtype(jnp.uint8),
    np.dtype(jnp.float8_e4m3fnuz): np.dtype(jnp.uint8),
    np.dtype(jnp.float8_e5m2): np.dtype(jnp.uint8),
}

# The one-byte dtypes have a scale per token and kv head (`jkv.storage.quantization`).
SCALE_DTYPE = np.dtype(jnp.bfloat16)

# The arrays with layers on the first axis and blocks on the second.
SCALE_NAMES = {"keys": "key_scales", "values": "value_scales"}

STORAGE_NAMES = (*SCALE_NAMES, *SCALE_NAMES.values())

# What every card can read, whichever encoding it prefers, so that files travel.
DTYPE_NAMES = {"fp8": np.dtype(jnp.float8_e4m3fn)}


def needs_scales(dtype: np.dtype[Any]) -> bool:
    """Return whether a cache of the dtype is quantised, and keeps scales."""
    return dtype.itemsize == 1


def largest_number(dtype: np.dtype[Any]) -> float:
    """Return the largest number of a one-byte dtype: 127, 448, 240 or 57344."""
    if dtype == jnp.int8:
        return 127.0
    return float(jnp.finfo(dtype).max)


def checked_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype of keys and values, or say which ones there are."""
    if isinstance(dtype, str):
        dtype = DTYPE_NAMES.get(dtype, dtype)
    for known in STORAGE_DTYPES:
        try:
            if np.dtype(dtype) == known:
                return known
        except TypeError:
            break
    names = ", ".join([*(known.name for known in STORAGE_DTYPES), *DTYPE_NAMES])
    raise ValueError(f"dtype must be one of {names}; got {dtype!r}")
