"""Rows of a step: one for each sequence that runs, the rest to the oldest.

Symbols: W places, R rows of a step.
"""

import jax
import jax.numpy as jnp

from jkv.metadata.entries import find_owners
from jkv.metadata.requests import saturating_cumsum
from jkv.metadata.xla_cpu import running_sum


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


def locate_rows(
    counts: jax.Array, first: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Return whose token each row of a step is, and where it stands in the text.

    Args:
      counts: i32[W], rows of each; they follow each other.
      first: i32[W], the position of each one's first row.
      num_rows: R, static.

    Returns:
      i32[R], the place, and i32[R], the position; anything behind the last row.
    """
    starts = running_sum(counts) - counts
    row = jnp.arange(num_rows, dtype=jnp.int32)
    owner = find_owners(starts, row)
    return owner, row + (first - starts)[owner]


def choose_size(work: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """Return the index of the smallest size, ascending, that holds the work, i32[]."""
    too_small = [(work > size).astype(jnp.int32) for size in sizes[:-1]]
    return sum(too_small, start=jnp.int32(0))
