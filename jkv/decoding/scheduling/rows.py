"""Rows of a step: one for each sequence that runs, the rest to the oldest."""

import jax
import jax.numpy as jnp

from jkv.metadata.requests import saturating_cumsum


def share_rows(left: jax.Array, ages: jax.Array, num_rows: int) -> jax.Array:
    """Share the rows of a step.

    Args:
      left: i32[W], tokens that each place's sequence has yet to compute.
      ages: i32[W], the places' ages.
      num_rows: rows of the largest step, at least W.

    Returns:
      i32[W], rows of each.
    """
    first = jnp.minimum(left, 1)
    more = jnp.clip(left - 1, 0, num_rows)
    more_by_age = jnp.zeros_like(more).at[ages].set(more)
    wanted = saturating_cumsum(more_by_age, num_rows)
    wanted_by_older = jnp.concatenate([jnp.zeros((1,), jnp.int32), wanted[:-1]])[ages]
    room = num_rows - jnp.sum(first, dtype=jnp.int32)
    return first + jnp.clip(room - wanted_by_older, 0, more)


def choose_size(work: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """Return the index of the smallest size, ascending, that holds the work, i32[]."""
    too_small = [(work > size).astype(jnp.int32) for size in sizes[:-1]]
    return sum(too_small, start=jnp.int32(0))
