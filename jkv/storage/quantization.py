"""Rows of keys and values to stored elements and back, quantized or not.

One-byte dtypes keep a scale for each token and kv head: the largest magnitude of the
row over the largest number of the dtype. A row is quantized once, when it is written,
and whatever is written later leaves it alone. A scale per block would have to be raised
whenever a larger token came, and the block's earlier tokens rounded again. A scale
fixed beforehand needs data to calibrate it, and fails on what the data lacked.

The price is 2 bytes beside the head dim's: scales are bfloat16, rounded up. The rows
are divided by the rounded scale: nothing exceeds the range, and at most 0.8% of it is
not used.

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
from jkv.attention.elements import STORED_AS
from jkv.config.dtypes import SCALE_DTYPE, largest_number, needs_scales

# A row of zeros has this scale; nothing smaller is kept apart from zero.
_SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)


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
    numbers, scales = round_rows(rows, dtype)
    return _as_stored(numbers), None if scales is None else _as_stored(scales)


def round_rows(
    rows: jax.Array, dtype: np.dtype[Any]
) -> tuple[jax.Array, jax.Array | None]:
    """Return the numbers whose bits `quantize` returns, in the cache's dtype.

    Scales are bfloat16[...], None for a dtype that needs none.
    """
    chex.assert_type(rows, float)
    if dtype not in (jnp.float32, jnp.float16):
        rows = _without_derivative(rows, np.dtype(dtype).name)
    if not needs_scales(dtype):
        return rows.astype(dtype), None
    rows = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(rows), axis=-1)
    scales = round_up(jnp.maximum(largest / largest_number(dtype), _SMALLEST_SCALE))
    # Infinity over infinity is NaN, for which int8 has no number.
    scales = jnp.where(jnp.isfinite(largest), scales, jnp.asarray(jnp.nan, SCALE_DTYPE))
    rows = rows / scales.astype(jnp.float32)[..., None]
    rows = jnp.where(jnp.isnan(rows), 0.0, rows)
    if dtype == jnp.int8:
        rows = jnp.round(rows)
    return rows.astype(dtype), scales


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


def round_up(scales: jax.Array) -> jax.Array:
    """Round f32[...], positive, to the next bfloat16 that is not smaller."""
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    bits = (bits + jnp.uint32(0xFFFF)) >> jnp.uint32(16)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def _as_stored(array: jax.Array) -> jax.Array:
    return _as_meant(array, STORED_AS[np.dtype(array.dtype)])


def _as_meant(bits: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)
