"""Rows of a step: one for each sequence that runs, the rest to the oldest.

Symbols: W places, R rows of a step.
"""

import math

import jax
import jax.numpy as jnp

from jkv.arguments import explains_arguments
from jkv.indexing import gather
from jkv.metadata.entries import find_owners
from jkv.metadata.requests import check_counts, saturating_cumsum
from jkv.metadata.xla_cpu import running_sum

# Rows of a step with prompts when the caller does not say: enough to keep a processor
# busy, few enough that the step's activations stay small.
CHUNK_SIZE = 512

# Sizes of a step that `spread_row_counts` returns at most. What it returns is a copy of
# the model each, so that one which would spare fewer rows than this is left out.
_MOST_SIZES = 4
_LEAST_SPARED = 128
_MULTIPLE = 16  # of the sizes in between, which matrix units like


@explains_arguments
def spread_row_counts(
    max_running: int, chunk_size: int = CHUNK_SIZE
) -> tuple[int, ...]:
    """Return row counts for queues of prompts much shorter than a chunk.

    Where one sequence ends at a time, a step has the rows of one prompt beside those
    that run, and `generate` computes all rows of the smallest size that holds them.
    Sizes between the least and the largest, as far from each other by ratio, spare
    most of that; each is a copy of the model to compile.

    Args:
      max_running: most sequences that run at one time, the least size.
      chunk_size: rows of the largest, unless more run.

    Returns:
      Ascending numbers for `row_counts` of `generate`, four at most.

    Raises:
      ValueError: for a number below 1.

    Example:
      >>> from jkv.decoding import spread_row_counts
      >>> spread_row_counts(64), spread_row_counts(8), spread_row_counts(8, 64)
      ((64, 128, 256, 512), (8, 128, 512), (8, 64))
    """
    check_counts(max_running=max_running, chunk_size=chunk_size)
    most = max(max_running, chunk_size)
    ratio = most / max_running
    num_sizes = min(_MOST_SIZES, 1 + int(math.log2(ratio)))
    counts = [most]
    for i in reversed(range(1, num_sizes - 1)):
        size = max_running * ratio ** (i / (num_sizes - 1))
        size = _MULTIPLE * round(size / _MULTIPLE)
        if size > max_running and counts[0] - size >= _LEAST_SPARED:
            counts.insert(0, size)
    return tuple(sorted({max_running, *counts}))


def share_rows(
    left: jax.Array,  # i32[W], tokens that each place's sequence has yet to compute
    ages: jax.Array,  # i32[W], the places' ages
    num_rows: int,  # rows of the largest step, at least W
) -> jax.Array:
    """Return how many rows of a step each place has, i32[W]."""
    first = jnp.minimum(left, 1)
    more = jnp.clip(left - 1, 0, num_rows)
    more_by_age = jnp.zeros_like(more).at[ages].set(more)
    wanted = saturating_cumsum(more_by_age, num_rows)
    wanted_by_older = gather(
        jnp.concatenate([jnp.zeros((1,), jnp.int32), wanted[:-1]]), ages
    )
    room = num_rows - jnp.sum(first, dtype=jnp.int32)
    return first + jnp.clip(room - wanted_by_older, 0, more)


def locate_rows(
    counts: jax.Array,  # i32[W], rows of each; they follow each other
    first: jax.Array,  # i32[W], the position of each one's first row
    num_rows: int,  # R, static
) -> tuple[jax.Array, jax.Array]:
    """Return whose token each row of a step is, and its position, i32[R] each."""
    starts = running_sum(counts) - counts
    row = jnp.arange(num_rows, dtype=jnp.int32)
    owner = find_owners(starts, 0, num_rows)
    return owner, row + gather(first - starts, owner)


def choose_size(work: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """Return the index of the smallest size, ascending, that holds the work, i32[]."""
    too_small = [(work > size).astype(jnp.int32) for size in sizes[:-1]]
    return sum(too_small, start=jnp.int32(0))
