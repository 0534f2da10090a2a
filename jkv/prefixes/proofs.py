"""Proofs that a block follows a prefix: its parent, or more hashes.

With full attention in the leading group, a parent stays as long as its children: a
prompt is proved from its first block on. A sliding window releases parents before their
children. There each block is identified by its own tokens, and by two more hashes of
all tokens before it: 96 bits per prefix.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata import tables
from jkv.operations import gather
from jkv.prefixes import hashing
from jkv.prefixes.arrays import IndexArrays
from jkv.prefixes.prefix_index import index_of, tokens_of
from jkv.state import Metadata


class Tip(NamedTuple):
    """End of a prefix of each of B prompts."""

    block: jax.Array  # i32[B], last block, N for an empty prefix
    hash: jax.Array  # u32[B], of the prefix
    wide: jax.Array | None  # u32[B, 2], more hashes of it, if parents may be released


def hash_prompts(
    index: IndexArrays, whole: jax.Array, column: jax.Array, salts: jax.Array
) -> jax.Array | None:
    """Return the wide hashes up to columns' ends, u32[B, C, 2], if any."""
    if index.wide_hashes is None:
        return None
    terms = hashing.wide_column_hash(whole, column)
    sums = jnp.cumsum(terms, axis=1, dtype=jnp.uint32)
    return hashing.wide_salt_hash(salts)[:, None] + sums


def hash_lanes(
    index: IndexArrays,
    salts: jax.Array,
    tokens: jax.Array,
    column: jax.Array,
    before: jax.Array,  # i32[P], the preceding block
    first_lane: jax.Array | None,
) -> jax.Array | None:
    """Return the wide hashes up to the lanes' blocks' ends, u32[P, 2], if any."""
    if index.wide_hashes is None:
        return None
    above = jnp.where(
        (column == 0)[:, None],
        hashing.wide_salt_hash(salts),
        gather(index.wide_hashes, before),
    )
    return hashing.run_on(above, hashing.wide_column_hash(tokens, column), first_lane)


def known_parents(index: IndexArrays, before: jax.Array) -> jax.Array | None:
    """Return the preceding blocks, i32[...], if parents are compared."""
    return before if index.wide_hashes is None else None


def follows(
    index: IndexArrays, block: jax.Array, parent: jax.Array
) -> jax.Array | np.ndarray:
    """Return True where indexed blocks, i32[P], follow their parents, i32[P].

    With wide hashes, the block's own hashes have proved it already.
    """
    if index.wide_hashes is not None:
        return np.ones(block.shape, bool)
    return gather(index.parents, block) == parent


def follows_tip(
    metadata: Metadata, child: jax.Array, column: jax.Array, tip: Tip
) -> jax.Array:
    """Return True where blocks, i32[B, K], of a column, i32[B], follow prefixes."""
    index = index_of(metadata)
    if index.wide_hashes is None or tip.wide is None:
        return gather(index.parents, child) == tip.block[:, None]
    tokens = gather(tokens_of(metadata), child)
    above = gather(index.hashes, child)
    above -= hashing.column_hash(tokens, column[:, None])
    wide = gather(index.wide_hashes, child)
    wide -= hashing.wide_column_hash(tokens, column[:, None])
    return (above == tip.hash[:, None]) & jnp.all(wide == tip.wide[:, None], axis=-1)


def has_block_before(
    metadata: Metadata, seq_ids: jax.Array, column: jax.Array
) -> jax.Array | bool:
    """Return True where the leader's block before a column is mapped, bool[B].

    A later step may have released it, and with it the hashes to continue from.
    """
    if index_of(metadata).wide_hashes is None:
        return True
    group = metadata.leading
    before = tables.blocks_at(group, jnp.maximum(seq_ids, 0), column - 1)
    return (column == 0) | (before < group.num_blocks)
