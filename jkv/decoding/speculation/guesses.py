"""What is guessed of each text, how much there is room for, and the rows of a step.

Symbols: W places, K guesses of each, R rows of a step.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.model.rows import locate_rows
from jkv.decoding.scheduler.demand import Loads
from jkv.decoding.scheduler.state import GenerationState
from jkv.decoding.texts.blocks import (
    BlockSize,
    count_columns,
    count_free_blocks,
    reach,
    subtract,
    total,
)
from jkv.metadata.xla_cpu import running_sum
from jkv.state import Cache


class Guesses(NamedTuple):
    """What is guessed of each place's text."""

    tokens: jax.Array  # i32[W, K]
    counts: jax.Array  # i32[W], how many there are

    @classmethod
    def none(cls, num_places: int, num_tokens: int) -> "Guesses":
        """Guess nothing."""
        return cls(
            tokens=jnp.zeros((num_places, num_tokens), jnp.int32),
            counts=jnp.zeros((num_places,), jnp.int32),
        )


class Rows(NamedTuple):
    """Where each of R rows stands."""

    places: jax.Array  # i32[R], the place of its text
    before: jax.Array  # i32[R], guesses of its text before it, its own counted

    @classmethod
    def of(cls, counts: jax.Array, num_rows: int) -> "Rows":
        """Locate the rows of texts that have so many each, i32[W]."""
        return cls(*locate_rows(counts, jnp.zeros_like(counts), num_rows))


def limit_guesses(
    cache: Cache, state: GenerationState, loads: Loads, counts: jax.Array
) -> jax.Array:
    """Return how many guesses there is room for, at most `counts`, i32[W].

    A text takes no more than it may become, and no block that another was promised.
    """
    places, size = state.places, BlockSize(cache.block_size)
    made = state.result.lengths[places.sequences]
    left = state.prompts.limits[loads.prompts] - made
    room = cache.max_context_length - loads.text_lengths
    counts = jnp.clip(jnp.minimum(left - 1, room), 0, counts)
    is_ready = places.is_cached & places.is_running
    counts = jnp.where(is_ready, counts, 0)

    if not loads.mapped:  # no group of layers has blocks
        return counts
    columns = count_columns(loads.text_lengths, size)
    promised = tuple(jnp.maximum(mapped, columns) for mapped in loads.mapped)
    needs = subtract(promised, loads.mapped)
    needs = tuple(jnp.where(is_ready, need, 0) for need in needs)
    slack = subtract(count_free_blocks(cache), total(needs))
    columns = count_columns(loads.text_lengths + counts, size)
    more = [jnp.maximum(columns - each, 0) for each in promised]
    fits = reach(
        slack, tuple(running_sum(jnp.where(is_ready, each, 0)) for each in more)
    )
    owned = functools.reduce(jnp.minimum, promised) * size.tokens
    owned = jnp.maximum(owned - loads.text_lengths, 0)
    return jnp.where(fits, counts, jnp.minimum(counts, owned))


def row_sizes(num_places: int, num_tokens: int) -> tuple[int, ...]:
    """Return the rows that a step with guesses may have, ascending.

    The last holds all guesses of all places. The first holds those of a quarter of the
    places, and a row for each other; where it would hardly be smaller there is none.
    Each is a program to compile.

    Args:
      num_places: W.
      num_tokens: K.
    """
    most = num_places * (num_tokens + 1)
    few = num_places + num_tokens * -(-num_places // 4)
    return (few, most) if 2 * few <= most else (most,)
