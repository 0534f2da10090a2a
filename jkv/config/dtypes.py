"""Which dtypes keys and values may have, and which arrays hold them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jkv.attention.elements import SCALE_NAMES, STORED_AS

# The arrays with layers on the first axis and blocks on the second.
STORAGE_NAMES = (*SCALE_NAMES, *SCALE_NAMES.values())

# What every card can read, whichever encoding it prefers, so that files travel.
DTYPE_NAMES = {"fp8": np.dtype(jnp.float8_e4m3fn)}


def needs_scales(dtype: np.dtype[Any]) -> bool:
    """Return whether a cache of the dtype is quantized, and keeps scales.

    One for each token and kv head (`jkv.attention.rounding`).
    """
    return dtype.itemsize == 1


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
