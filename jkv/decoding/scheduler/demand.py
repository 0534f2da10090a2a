"""Demand: what the sequence of each place has, and the blocks that it was promised.

Symbols: W places.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.scheduler.places import Places
from jkv.decoding.texts.blocks import (
    Blocks,
    BlockSize,
    blocks_beside_prompt,
    blocks_to_take,
)


class Loads(NamedTuple):
    """What the sequence of each of W places has, anything where a place is empty."""

    prompts: jax.Array  # i32[W], its prompt
    prompt_lengths: jax.Array  # i32[W], tokens of that
    text_lengths: jax.Array  # i32[W], those generated too
    done: jax.Array  # i32[W], tokens in the cache, 0 where it is not there
    # i32[W], its blocks, those given back too, 0 where it is not in the cache
    mapped: Blocks
    kept: Blocks  # i32[W], its blocks without those

    def count_left(self, places: Places) -> jax.Array:
        """Return the tokens of each yet to be computed, i32[W]; 0 out of the cache."""
        return jnp.where(places.is_cached, self.text_lengths - self.done, 0)

    @property
    def has_prompt(self) -> jax.Array:
        """Whether all of its prompt is in the cache, bool[W]."""
        return self.done >= self.prompt_lengths


def find_demand(places: Places, loads: Loads, size: BlockSize) -> Blocks:
    """Return the blocks that each running sequence needs for its text, i32[W].

    A sample that waits for its prompt will share it.
    """
    own = blocks_beside_prompt(loads.prompt_lengths, loads.text_lengths, size)
    more = blocks_to_take(loads.text_lengths, loads.mapped, loads.kept, size)
    needs = [jnp.where(places.is_cached, *each) for each in zip(more, own, strict=True)]
    return tuple(jnp.where(places.is_running, need, 0) for need in needs)
