"""Demand: what each place's sequence has, and the blocks that it was promised.

A cache of groups of layers has a pool for each group, and a sequence needs blocks in
all of them: numbers of blocks are tuples, with one array for each group.

Symbols: W places, T tokens per block.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.scheduling.places import Places
from jkv.metadata.xla_cpu import divide

# Numbers of blocks in each group, i32[...].
Blocks = tuple[jax.Array, ...]


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


class BlockSize(NamedTuple):
    """How many blocks a text takes: all of it, or with a window no more than some."""

    tokens: int  # T
    # Of each group, blocks that one sequence ever has at a time; None: those of the
    # whole text.
    most: tuple[int | None, ...] = (None,)

    @property
    def is_reserved(self) -> bool:
        """Whether `allocate` reserves all blocks of a text, in every group."""
        return all(most is None for most in self.most)

    def at_most(self, blocks: jax.Array) -> Blocks:
        """Return numbers of blocks, i32[...], no more than a sequence ever has."""
        return tuple(
            blocks if most is None else jnp.minimum(blocks, most) for most in self.most
        )


def count_columns(num_tokens: jax.Array, size: BlockSize) -> jax.Array:
    """Return the blocks for numbers of tokens, i32[...], none of them given back."""
    full, rest = divide(num_tokens, size.tokens)
    return full + (rest > 0).astype(jnp.int32)


def blocks_for(num_tokens: jax.Array, size: BlockSize) -> Blocks:
    """Return the blocks for numbers of tokens, i32[...], of 0 or more."""
    return size.at_most(count_columns(num_tokens, size))


def blocks_beside_prompt(
    prompt_lengths: jax.Array, text_lengths: jax.Array, size: BlockSize
) -> Blocks:
    """Return the blocks of a text, i32[...], that cannot be shared with its group.

    Its first new token has a slot, whether it has been drawn or not.
    """
    length = jnp.maximum(text_lengths, prompt_lengths + 1)
    shared, _ = divide(prompt_lengths, size.tokens)
    return size.at_most(count_columns(length, size) - shared)


def find_demand(places: Places, loads: Loads, size: BlockSize) -> Blocks:
    """Return the blocks that each running sequence needs for its text, i32[W].

    Whoever waits for its prompt will share it.
    """
    own = blocks_beside_prompt(loads.prompt_lengths, loads.text_lengths, size)
    more = blocks_to_take(loads.text_lengths, loads.mapped, loads.kept, size)
    needs = [jnp.where(places.is_cached, *each) for each in zip(more, own, strict=True)]
    return tuple(jnp.where(places.is_running, need, 0) for need in needs)


def blocks_to_take(
    text_lengths: jax.Array, mapped: Blocks, kept: Blocks, size: BlockSize
) -> Blocks:
    """Return the blocks that sequences in the cache need for their texts, i32[...].

    Args:
      text_lengths: i32[...], tokens that there shall be.
      mapped: i32[...], blocks that were ever taken for the text.
      kept: i32[...], those that were not given back.
      size: of a block.
    """
    whole = count_columns(text_lengths, size)

    def more_in(most: int | None, mapped: jax.Array, kept: jax.Array) -> jax.Array:
        more = jnp.maximum(whole - mapped, 0)
        return more if most is None else jnp.minimum(more, jnp.maximum(most - kept, 0))

    return tuple(map(more_in, size.most, mapped, kept))


def total(blocks: Blocks) -> Blocks:
    """Return the sums of numbers of blocks, i32[...], in each group, i32[]."""
    return tuple(jnp.sum(each, dtype=jnp.int32) for each in blocks)


def sum_groups(blocks: Blocks) -> jax.Array:
    """Return numbers of blocks of all groups together, i32[...]."""
    return functools.reduce(operator.add, blocks)


def subtract(blocks: Blocks, others: Blocks) -> Blocks:
    """Return the difference in each group."""
    return tuple(map(operator.sub, blocks, others))


def reach(blocks: Blocks, needs: Blocks) -> jax.Array:
    """Return whether there are as many blocks as needed in all groups, bool[...]."""
    return functools.reduce(operator.and_, map(operator.ge, blocks, needs))
