"""Blocks needed by sequences in each group of layers.

A sequence needs blocks in every group, and each group has its own pool. Numbers of
blocks are tuples with one array per group.

Symbols: T tokens per block.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.operations import divide, gather
from jkv.state import Cache

# Numbers of blocks in each group, i32[...].
Blocks = tuple[jax.Array, ...]


class BlockSize(NamedTuple):
    """Block size and the most blocks of a sequence, bounded by sliding windows."""

    tokens: int  # T
    # Most blocks of a sequence at one time, per group; None without a window.
    most: tuple[int | None, ...] = (None,)

    @property
    def is_reserved(self) -> bool:
        """True if `allocate` reserves all blocks of a sequence, in every group."""
        return all(most is None for most in self.most)

    def at_most(self, blocks: jax.Array) -> Blocks:
        """Clip numbers of blocks, i32[...], to the most of a sequence, per group."""
        return tuple(
            blocks if most is None else jnp.minimum(blocks, most) for most in self.most
        )


def find_block_size(cache: Cache, row_counts: tuple[int, ...]) -> BlockSize:
    """Return the blocks a sequence needs in a cache, for steps of these row counts."""
    size, windows = (
        cache.block_size,
        [each.window for each in cache.metadata.block_groups],
    )
    return BlockSize(
        size, tuple(each.most_blocks(size, row_counts[-1]) for each in windows)
    )


def count_free_blocks(cache: Cache) -> Blocks:
    """Return the free blocks, i32[] per group."""
    return tuple(group.free_blocks.count for group in cache.metadata.block_groups)


def count_used_blocks(cache: Cache) -> jax.Array:
    """Return the blocks in use, i32[], of all groups together."""
    groups = cache.metadata.block_groups
    return sum_groups(
        tuple(jnp.int32(g.num_blocks) - g.free_blocks.count for g in groups)
    )


def count_cached(cache: Cache, seq_ids: jax.Array) -> jax.Array:
    """Return the cached tokens of sequences, i32[...]; 0 for none."""
    row = jnp.where(seq_ids >= 0, seq_ids, cache.max_sequences)
    return gather(cache.metadata.context_lengths, row, fill=0)


def count_positions(cache: Cache, seq_ids: jax.Array, slots: jax.Array) -> jax.Array:
    """Return the computed tokens of sequences with cached `slots`, i32[...]."""
    return cache.metadata.sequences.pruned.positions_of(seq_ids, slots)


class Held(NamedTuple):
    """Blocks of sequences in a cache; 0 for none."""

    mapped: Blocks  # i32[...], allocated so far, including released ones
    kept: Blocks  # i32[...], not yet released

    @classmethod
    def of(cls, cache: Cache, seq_ids: jax.Array) -> "Held":
        """Return the blocks of sequences, i32[...], -1 for none."""
        row = jnp.where(seq_ids >= 0, seq_ids, cache.max_sequences)

        def find(array: jax.Array) -> jax.Array:
            return gather(array, row, fill=0)

        groups = cache.metadata.block_groups
        mapped = tuple(find(group.num_mapped_blocks) for group in groups)
        return cls(mapped, tuple(find(group.num_kept_blocks) for group in groups))


def count_columns(num_tokens: jax.Array, size: BlockSize) -> jax.Array:
    """Return the blocks for numbers of tokens, i32[...], none released."""
    full, rest = divide(num_tokens, size.tokens)
    return full + (rest > 0).astype(jnp.int32)


def of_tokens(num_tokens: jax.Array, size: BlockSize) -> Blocks:
    """Return the blocks for numbers of tokens, i32[...], per group."""
    return size.at_most(count_columns(num_tokens, size))


def beside_prompt(
    prompt_lengths: jax.Array, sequence_lengths: jax.Array, size: BlockSize
) -> Blocks:
    """Return the blocks of a sequence, i32[...], not shared with other samples.

    The slot of its first new token counts, chosen or not.
    """
    length = jnp.maximum(sequence_lengths, prompt_lengths + 1)
    shared, _ = divide(prompt_lengths, size.tokens)
    return size.at_most(count_columns(length, size) - shared)


def to_take(
    sequence_lengths: jax.Array,  # i32[...], tokens to hold
    held: Held,
    size: BlockSize,  # blocks of a sequence
) -> Blocks:
    """Return the blocks that cached sequences still need, i32[...], per group."""
    whole = count_columns(sequence_lengths, size)

    def more_in(most: int | None, mapped: jax.Array, kept: jax.Array) -> jax.Array:
        more = jnp.maximum(whole - mapped, 0)
        return more if most is None else jnp.minimum(more, jnp.maximum(most - kept, 0))

    return tuple(map(more_in, size.most, *held))


def total(blocks: Blocks) -> Blocks:
    """Sum numbers of blocks, i32[...], to i32[] per group."""
    return tuple(jnp.sum(each, dtype=jnp.int32) for each in blocks)


def sum_groups(blocks: Blocks) -> jax.Array:
    """Sum numbers of blocks over groups, i32[...]; 0 without groups."""
    return functools.reduce(operator.add, blocks or (jnp.int32(0),))


def subtract(blocks: Blocks, others: Blocks) -> Blocks:
    return tuple(map(operator.sub, blocks, others))


def reach(blocks: Blocks, needs: Blocks) -> jax.Array:
    """Return True if all groups have the needed blocks, bool[...]."""
    if not blocks:  # layers without blocks need none
        return jnp.bool_(True)
    return functools.reduce(operator.and_, map(operator.ge, blocks, needs))
