"""Arrays that say how texts are steered: one for all, or a row for each variant.

Symbols: M variants, K sequences.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jkv.status import UsageError


def count_variants(
    table: Any,  # an array or a number
    num_axes: int,  # those that it has when it holds for all
) -> int:
    """Return how many variants an array tells apart; one if it holds for all."""
    shape = jnp.shape(table)
    return shape[0] if len(shape) > num_axes else 1


def find_rows(
    table: Any,  # an array or a number
    num_axes: int,  # those that it has when it holds for all
    variants: jax.Array,  # i32[K]
) -> jax.Array:
    """Return what holds for each sequence, [K, ...]."""
    table = jnp.asarray(table)
    if table.ndim > num_axes:
        return table[variants]
    return jnp.broadcast_to(table[None], (variants.shape[0], *table.shape))


def check_integers(where: str, array: Any, shapes: tuple[str, ...]) -> jax.Array:
    """Return an array or a number as i32, of a shape such as "[M, E]" or "[]"."""
    return _check(where, array, shapes, jnp.integer, jnp.int32)


def check_numbers(
    where: str,  # what it is called, in a message
    array: Any,  # it
    shapes: tuple[str, ...],  # those that it may have
) -> jax.Array:
    """Return an array as f32, as `check_integers` does."""
    return _check(where, array, shapes, jnp.number, jnp.float32)


def _check(
    where: str, array: Any, shapes: tuple[str, ...], kind: Any, dtype: Any
) -> jax.Array:
    """Return an array as `dtype`, if it is of a kind and has the axes of a shape."""
    given = jnp.asarray(array)
    axes = [shape.count(",") + (shape != "[]") for shape in shapes]
    if not jnp.issubdtype(given.dtype, kind) or given.ndim not in axes:
        name = jnp.dtype(dtype).name
        raise UsageError(
            f"{where} must be {' or '.join(name + shape for shape in shapes)}, got "
            f"{given.dtype}{list(given.shape)}"
        )
    return given.astype(dtype)
