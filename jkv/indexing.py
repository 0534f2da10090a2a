"""Gather and scatter by index arrays, without the index arithmetic of `.at[]`.

`x.at[i]` first wraps negative indices: a compare, an add and a select for each access,
half of the operations of a verb. Here indices are not wrapped. Out-of-range indices on
either side are clamped by `gather`, or return `fill`, and are dropped by scatters.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

# One index array, or one for each leading axis.
Index: TypeAlias = jax.Array | tuple[jax.Array, ...]


def gather(
    array: jax.Array, index: Index, *, fill: jax.Array | int | float | None = None
) -> jax.Array:
    """Return the elements, or rows, of an array at an index.

    Args:
      array: [N, ...], or [N, M, ...] for two index arrays.
      index: i32[...], or a tuple of such arrays, one for each leading axis.
      fill: the result where an index is out of range; None clamps the index.

    Returns:
      [*index.shape, ...] of the array's dtype.
    """
    found = array.at[index].get(mode="clip", wrap_negative_indices=False)
    if fill is None:
        return found
    indices = index if isinstance(index, tuple) else (index,)
    inside = None
    for size, each in zip(array.shape, indices, strict=False):
        # As unsigned numbers, negative indices are too large.
        unsigned = jax.lax.bitcast_convert_type(jnp.int32(each), jnp.uint32)
        fits = unsigned < jnp.uint32(size)
        inside = fits if inside is None else inside & fits
    assert inside is not None
    inside = inside.reshape(inside.shape + (1,) * (found.ndim - inside.ndim))
    # A number of the host: as an operation a NaN would stop `jax_debug_nans`.
    other = fill if isinstance(fill, jax.Array) else np.asarray(fill, array.dtype)
    return jnp.where(inside, found, other)


def scatter(
    array: jax.Array,
    index: Index,
    values: jax.Array | int | bool,
    *,
    unique: bool = False,
) -> jax.Array:
    """Set elements, or rows, of an array at an index; out of range is dropped.

    Args:
      array: [N, ...], or [N, M, ...] for two index arrays.
      index: i32[...], or a tuple of such arrays, one for each leading axis.
      values: broadcast to [*index.shape, ...].
      unique: no two indices are equal, dropped ones included.
    """
    return array.at[index].set(
        values, mode="drop", unique_indices=unique, wrap_negative_indices=False
    )


def scatter_add(array: jax.Array, index: Index, values: jax.Array | int) -> jax.Array:
    """Add to elements of an array at an index; equal indices add up."""
    return array.at[index].add(values, mode="drop", wrap_negative_indices=False)


def scatter_min(array: jax.Array, index: Index, values: jax.Array) -> jax.Array:
    """Lower elements of an array at an index to values."""
    return array.at[index].min(values, mode="drop", wrap_negative_indices=False)


def scatter_max(array: jax.Array, index: Index, values: jax.Array) -> jax.Array:
    """Raise elements of an array at an index to values."""
    return array.at[index].max(values, mode="drop", wrap_negative_indices=False)
