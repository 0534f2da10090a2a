"""Rows as a cache of a dtype stores them, and back."""

import jax.numpy as jnp

from jkv.formats.format import Numbers
from jkv.formats.table import FORMATS


def quantize(rows, dtype):
    """The bits of rows, [..., D], and of their scales, None for none."""
    kept = FORMATS[jnp.dtype(dtype)]
    parts = kept.put(kept.prepare(jnp.asarray(rows)))
    return parts["pool"], parts.get("scales")


def restore(elements, scales, dtype):
    """Return `jkv.read`'s values; of elements alone, their own."""
    if scales is None:
        return Numbers(jnp.dtype(dtype)).read({"pool": elements})
    return FORMATS[jnp.dtype(dtype)].read({"pool": elements, "scales": scales})
