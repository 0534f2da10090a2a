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
    # i32[W], its blocks, those given back too, 0 where it is not in the cache
    mapped: jax.Array
    kept: jax.Array  # i32[W], its blocks without those

    def count_left(self, places: Places) -> jax.Array:
        """Return the tokens of each yet to be computed, i32[W]; 0 out of the cache."""
        return jnp.where(places.is_cached, self.text_lengths - self.done, 0)

    @property
    def has_prompt(self) -> jax.Array:
        """Whether all of its prompt is in the cache, bool[W]."""
        return self.done >= self.prompt_lengths


class BlockSize(NamedTuple):
    """How many blocks a text takes: all of it, or with a window no more than some."""

    tokens: int  # T
    # Blocks that one sequence ever has at a time; None: those of the whole text.
    most: int | None = None

    def at_most(self, blocks: jax.Array) -> jax.Array:
        """Return numbers of blocks, i32[...], no more than a sequence ever has."""
        return blocks if self.most is None else jnp.minimum(blocks, self.most)

    def tokens_to_reserve(self, lengths: jax.Array) -> jax.Array:
        """Return the tokens to reserve blocks for, i32[...], for texts of lengths."""
        if self.most is None:
            return lengths
        return jnp.minimum(lengths, self.most * self.tokens)


def blocks_for(num_tokens: jax.Array, size: BlockSize) -> jax.Array:
    """Return the blocks for numbers of tokens, i32[...], of 0 or more."""
    full, rest = divide(num_tokens, size.tokens)
    return size.at_most(full + (rest > 0).astype(jnp.int32))


def blocks_beside_prompt(
    prompt_lengths: jax.Array, text_lengths: jax.Array, size: BlockSize
) -> jax.Array:
    """Return the blocks of a text, i32[...], that cannot be shared with its group.

    Its first new token has a slot, whether it has been drawn or not.
    """
    length = jnp.maximum(text_lengths, prompt_lengths + 1)
    shared, _ = divide(prompt_lengths, size.tokens)
    whole = blocks_for(length, size._replace(most=None))
    return size.at_most(whole - shared)


def find_demand(places: Places, loads: Loads, size: BlockSize) -> jax.Array:
    """Return the blocks that each running sequence needs for its text, i32[W].

    Whoever waits for its prompt will share it.
    """
    own = blocks_beside_prompt(loads.prompt_lengths, loads.text_lengths, size)
    more = blocks_to_take(loads.text_lengths, loads.mapped, loads.kept, size)
    needs = jnp.where(places.is_cached, more, own)
    return jnp.where(places.is_running, needs, 0)


def blocks_to_take(
    text_lengths: jax.Array, mapped: jax.Array, kept: jax.Array, size: BlockSize
) -> jax.Array:
    """Return the blocks that sequences in the cache need for their texts, i32[...].

    Args:
      text_lengths: i32[...], tokens that there shall be.
      mapped: i32[...], blocks that were ever taken for the text.
      kept: i32[...], those that were not given back.
      size: of a block.
    """
    whole = blocks_for(text_lengths, size._replace(most=None))
    more = jnp.maximum(whole - mapped, 0)
    if size.most is None:
        return more
    return jnp.minimum(more, jnp.maximum(size.most - kept, 0))
