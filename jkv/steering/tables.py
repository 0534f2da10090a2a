"""Arrays that say how texts are steered: one for all, or a row for each variant.

Symbols: M variants, K sequences.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jkv.arguments import expect


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


def check_integers(where: str, array: Any, axes: str) -> jax.Array:
    """Return an array or a number as i32; `axes` as in `expect`."""
    given = jnp.asarray(array)
    expect(where, given, axes, kind=jnp.integer)
    return given.astype(jnp.int32)


def check_numbers(where: str, array: Any, axes: str) -> jax.Array:
    """Return an array or a number as f32; `axes` as in `expect`."""
    given = jnp.asarray(array)
    expect(where, given, axes, kind=jnp.number)
    return given.astype(jnp.float32)
