"""Which dtypes keys and values may have, and which arrays hold them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jkv.attention.elements import STORED_AS

# The one-byte dtypes have a scale per token and kv head (`jkv.storage.quantization`).
SCALE_DTYPE = np.dtype(jnp.bfloat16)

# The arrays with layers on the first axis and blocks on the second.
SCALE_NAMES = {"key_pool": "key_scales", "value_pool": "value_scales"}

STORAGE_NAMES = (*SCALE_NAMES, *SCALE_NAMES.values())

# What every card can read, whichever encoding it prefers, so that files travel.
DTYPE_NAMES = {"fp8": np.dtype(jnp.float8_e4m3fn)}


def needs_scales(dtype: np.dtype[Any]) -> bool:
    """Return whether a cache of the dtype is quantized, and keeps scales."""
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
    for known in STORED_AS:
        try:
            if np.dtype(dtype) == known:
                return known
        except TypeError:
            break
    names = ", ".join([*(known.name for known in STORED_AS), *DTYPE_NAMES])
    raise ValueError(f"dtype must be one of {names}; got {dtype!r}")
