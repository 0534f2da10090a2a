"""Demand: what each place's sequence has, and the blocks that it was promised.

Symbols: W places, T tokens per block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.scheduling.places import Places
from jkv.metadata.xla_cpu import divide


class Loads(NamedTuple):
    """What the sequence of each of W places has, anything where a place is empty."""

    prompts: jax.Array  # i32[W], its prompt
    prompt_lengths: jax.Array  # i32[W], tokens of that
    text_lengths: jax.Array  # i32[W], those generated too
    done: jax.Array  # i32[W], tokens in the cache, 0 where it is not there
    mapped: jax.Array  # i32[W], its blocks, 0 where it is not in the cache

    def count_left(self, places: Places) -> jax.Array:
        """Return the tokens of each yet to be computed, i32[W]; 0 out of the cache."""
        return jnp.where(places.is_cached, self.text_lengths - self.done, 0)

    @property
    def has_prompt(self) -> jax.Array:
        """Whether all of its prompt is in the cache, bool[W]."""
        return self.done >= self.prompt_lengths


def blocks_for(num_tokens: jax.Array, block_size: int) -> jax.Array:
    """Return the blocks for numbers of tokens, i32[...], of 0 or more."""
    full, rest = divide(num_tokens, block_size)
    return full + (rest > 0).astype(jnp.int32)


def blocks_beside_prompt(
    prompt_lengths: jax.Array, text_lengths: jax.Array, block_size: int
) -> jax.Array:
    """Return the blocks of a text, i32[...], that cannot be shared with its group.

    Its first new token has a slot, whether it has been drawn or not.
    """
    length = jnp.maximum(text_lengths, prompt_lengths + 1)
    shared, _ = divide(prompt_lengths, block_size)
    return blocks_for(length, block_size) - shared


def find_demand(places: Places, loads: Loads, block_size: int) -> jax.Array:
    """Return the blocks that each running sequence needs for its text, i32[W].

    Whoever waits for its prompt will share it.
    """
    whole = blocks_for(loads.text_lengths, block_size)
    own = blocks_beside_prompt(loads.prompt_lengths, loads.text_lengths, block_size)
    needs = jnp.where(places.is_cached, jnp.maximum(whole - loads.mapped, 0), own)
    return jnp.where(places.is_running, needs, 0)
