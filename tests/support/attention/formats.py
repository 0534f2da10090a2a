"""Quantize rows to a storage format, and restore them."""

import jax.numpy as jnp

from jkv.formats.format import Numbers
from jkv.formats.table import FORMATS


def quantize(rows, dtype):
    """Return the stored elements of rows [..., D], and their scales or None."""
    kept = FORMATS[jnp.dtype(dtype)]
    parts = kept.put(kept.prepare(jnp.asarray(rows)))
    return parts["pool"], parts.get("scales")


def restore(elements, scales, dtype):
    """Return the values that `jkv.read` returns for stored elements and scales."""
    if scales is None:
        return Numbers(jnp.dtype(dtype)).read({"pool": elements})
    return FORMATS[jnp.dtype(dtype)].read({"pool": elements, "scales": scales})
