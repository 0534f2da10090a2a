"""Copies of whole blocks: where sequences part ways, one gets a copy of the tail."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attention import lazy_chex as chex
from jkv.sharding.loops import fori_loop
from jkv.state import BlockGroup, BlockStorage


class BlockCopies(NamedTuple):
    """Blocks of a group whose contents one call copies, at most one per request."""

    source: jax.Array  # i32[B], any block where there is no copy
    target: jax.Array  # i32[B], N where there is no copy


def copy_tokens(group: BlockGroup, copies: BlockCopies) -> BlockGroup:
    """Copy the recorded tokens of blocks, if the group has tokens."""
    if group.tokens is None:
        return group
    rows = group.tokens.at[copies.source].get(mode="clip")
    tokens = group.tokens.at[copies.target].set(rows, mode="drop")
    return dataclasses.replace(group, tokens=tokens)


def copy_blocks(storage: BlockStorage, copies: BlockCopies) -> BlockStorage:
    """Return a group's storage with blocks copied, if there are any.

    Outside jit there is no pass over the storage if nothing is to be copied.
    """
    may_copy = storage.num_layers > 0
    if may_copy and not isinstance(copies.target, jax.core.Tracer):
        may_copy = bool(np.any(np.asarray(copies.target) < storage.num_blocks))
    if not may_copy:
        return storage
    return storage.with_arrays(_copy_blocks(storage.arrays, copies))


@jax.jit
def _copy_blocks(
    arrays: dict[str, jax.Array], copies: BlockCopies
) -> dict[str, jax.Array]:
    """Copy blocks in all layers; every source is read before any target is written."""
    chex.assert_equal_shape([copies.source, copies.target])
    chex.assert_type([copies.source, copies.target], jnp.int32)
    chex.assert_equal_shape_prefix(list(arrays.values()), 4)

    def copy(pool: jax.Array) -> jax.Array:
        blocks = pool.at[:, copies.source].get(mode="clip")
        return pool.at[:, copies.target].set(blocks, mode="drop")

    # A loop of no or one trip, as a call with nothing to copy is common. Unlike a
    # conditional it leaves the storage in place.
    any_copy = jnp.any(copies.target < arrays["key_pool"].shape[1]).astype(jnp.int32)
    return fori_loop(
        jnp.int32(0),
        any_copy,
        lambda _, arrays: jax.tree.map(copy, arrays),
        arrays,
    )
