"""The prefix index: which full blocks hold the keys and values of a prompt's beginning.

What a block holds depends on its tokens and on all tokens before it. The index is a
hash table over both: the hash of a prefix is a sum over its blocks, so that all hashes
of a prompt come from one running sum and all look-ups happen at once. (vLLM chains
block hashes the same way, one after another on the host; SGLang keeps a radix tree.)

A hash only proposes. A hit is confirmed by the block's tokens, its domain, and by its
parent being the hit of the column before, back to the first. A parent cannot be
recycled before its children, so a block id names the same contents all the while.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

import jax
import jax.numpy as jnp

from jkv.metadata import counters
from jkv.metadata.xla_cpu import written_after
from jkv.sharding.loops import fori_loop
from jkv.state import Metadata, PrefixIndex
from jkv.status import Counter

Rest = ParamSpec("Rest")
Step = Callable[Concatenate[Metadata, Rest], Metadata]


def if_indexed(step: Step[Rest]) -> Step[Rest]:
    """Make a step on a metadata with an index one that leaves any other as it is.

    The other answers of this room to a cache without an index stand where they are
    given: nothing is indexed, nothing is found, no hole, no epoch.
    """

    @functools.wraps(step)
    def guarded(
        metadata: Metadata, /, *args: Rest.args, **kwargs: Rest.kwargs
    ) -> Metadata:
        if metadata.prefix is None:
            return metadata
        return step(metadata, *args, **kwargs)

    return guarded


def index_of(metadata: Metadata) -> PrefixIndex:
    """Return the index, or say how to get one."""
    if metadata.prefix is None:
        raise ValueError(
            "this cache has no prefix index; configure it with "
            "CacheConfig(prefix_caching=True)"
        )
    return metadata.prefix


def tokens_of(metadata: Metadata) -> jax.Array:
    """Return the recorded tokens, i32[N, T]."""
    assert metadata.tokens is not None, "an index comes with recorded tokens"
    return metadata.tokens


def is_indexed(metadata: Metadata, block: jax.Array) -> jax.Array:
    """Return whether blocks, i32[...], are in the index; never without one."""
    if metadata.prefix is None:
        return jnp.zeros(block.shape, bool)
    return metadata.prefix.hashes.at[block].get(mode="fill", fill_value=0) != 0


def forget(prefix: PrefixIndex, block: jax.Array) -> PrefixIndex:
    """Take blocks, i32[P], out of the index; N is dropped."""
    hashes = prefix.hashes.at[block].set(jnp.uint32(0), mode="drop")
    return dataclasses.replace(prefix, hashes=hashes)


@if_indexed
def forget_from(metadata: Metadata, block: jax.Array) -> Metadata:
    """Forget blocks, i32[B], and all blocks that follow one of them; N is dropped.

    A block that will be written again leaves the index, and with it whatever was found
    by way of it: the blocks that its sequence has after it, and cached ones.
    """
    prefix = index_of(metadata)
    nothing = metadata.num_blocks
    indexed = jnp.where(is_indexed(metadata, block), block, nothing)

    def forget_all(_trip: jax.Array, hashes: jax.Array) -> jax.Array:
        gone = jnp.zeros((nothing,), bool).at[indexed].set(True, mode="drop")
        above = jnp.where(hashes != 0, prefix.parents, nothing)

        # Whom a block follows is asked of ever farther ancestors: 1, 2, 4, ... before.
        # Few steps for the longest chain; a loop would copy what it reads and writes.
        for _ in range(metadata.max_blocks_per_sequence.bit_length()):
            gone |= gone.at[above].get(mode="fill", fill_value=False)
            above = above.at[above].get(mode="fill", fill_value=nothing)
        block = jnp.where(gone, jnp.arange(nothing, dtype=jnp.int32), nothing)
        return hashes.at[block].set(jnp.uint32(0), mode="drop")

    # A pass over the pool, so only where there is something to forget.
    any_indexed = jnp.any(indexed < nothing).astype(jnp.int32)
    hashes = fori_loop(jnp.int32(0), any_indexed, forget_all, prefix.hashes)
    return dataclasses.replace(
        metadata, prefix=dataclasses.replace(prefix, hashes=hashes)
    )


@if_indexed
def forget_recycled(metadata: Metadata, block: jax.Array) -> Metadata:
    """Forget what blocks, i32[P], held, now that they are handed out; N is dropped."""
    prefix = index_of(metadata)
    was_indexed = is_indexed(metadata, block)
    indexed = written_after(was_indexed, block, metadata.num_blocks)
    prefix = dataclasses.replace(
        forget(prefix, indexed),
        positions=prefix.positions.at[block].set(-1, mode="drop"),
    )
    num = jnp.sum(was_indexed, dtype=jnp.int32)
    metadata = counters.add(metadata, {Counter.BLOCKS_EVICTED: num})
    return dataclasses.replace(metadata, prefix=prefix)


@if_indexed
def note_places(metadata: Metadata, block: jax.Array, place: jax.Array) -> Metadata:
    """Note the places in the ring, i32[P], of blocks that entered it; N is dropped."""
    prefix = index_of(metadata)
    positions = prefix.positions.at[block].set(place, mode="drop")
    prefix = dataclasses.replace(prefix, positions=positions)
    return dataclasses.replace(metadata, prefix=prefix)
