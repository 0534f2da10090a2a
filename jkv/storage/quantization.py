"""Rows of keys and values to stored elements and back, quantized or not.

One-byte dtypes keep a scale for each token and kv head (`jkv.attention.rounding`). A
row is quantized once, when it is written, and whatever is written later leaves it
alone. A scale per block would have to be raised whenever a larger token came, and the
block's earlier tokens rounded again. A scale fixed beforehand needs data to calibrate
it, and fails on what the data lacked. The price is 2 bytes beside the head dim's.

(vLLM scales per tensor, or as here per token and head with float32 scales, its pull
request 38378. KIVI, arXiv 2402.02750, quantizes keys per channel, to 2 bits, which
needs groups of tokens that no longer change.)
"""

import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attention import lazy_chex as chex
from jkv.attention.elements import SCALE_DTYPE, STORED_AS
from jkv.attention.rounding import round_rows
from jkv.config.dtypes import needs_scales


def quantize(
    rows: jax.Array, dtype: np.dtype[Any]
) -> tuple[jax.Array, jax.Array | None]:
    """Return rows as the storage keeps them.

    Args:
      rows: float[..., D].
      dtype: of the cache.

    Returns:
      The elements' bits, [..., D], and the bits of the scales, u16[...], None for a
      dtype that needs none. A row with NaN or infinity in it reads as NaN.
    """
    numbers = as_numbers(rows, dtype)
    if not needs_scales(dtype):
        return _as_stored(numbers), None
    elements, scales = round_rows(numbers, dtype)
    return _as_stored(elements), _as_stored(scales)


def as_numbers(rows: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Return rows in the cache's dtype; those to be quantized in one of up to 32 bits.

    What is stored as bits has no derivative from here on.
    """
    chex.assert_type(rows, float)
    if dtype not in (jnp.float32, jnp.float16):
        rows = _without_derivative(rows, np.dtype(dtype).name)
    if not needs_scales(dtype):
        return rows.astype(dtype)
    is_narrow = rows.dtype in (jnp.float16, jnp.bfloat16)
    return rows if is_narrow else rows.astype(jnp.float32)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _without_derivative(rows: jax.Array, dtype: str) -> jax.Array:
    """Return rows of which no derivative can be had, as they are stored as bits."""
    del dtype
    return rows


@_without_derivative.defjvp
def _refuse_derivative(dtype: str, _primals: Any, _tangents: Any) -> NoReturn:
    raise ValueError(
        f"there is no derivative with respect to keys and values stored as {dtype}: it "
        f"would be zero without a word. Differentiate on a cache with "
        f"CacheConfig(dtype='float32'), or cut them off with jax.lax.stop_gradient"
    )


def restore(
    elements: jax.Array, scales: jax.Array | None, dtype: np.dtype[Any]
) -> jax.Array:
    """Return stored rows, [..., D], in the cache's dtype, or in float32 with scales."""
    elements = _as_meant(elements, dtype)
    if scales is None:
        return elements
    chex.assert_shape(scales, elements.shape[:-1])
    scales = _as_meant(scales, SCALE_DTYPE).astype(jnp.float32)
    return elements.astype(jnp.float32) * scales[..., None]


def _as_stored(array: jax.Array) -> jax.Array:
    return _as_meant(array, STORED_AS[np.dtype(array.dtype)])


def _as_meant(bits: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)
