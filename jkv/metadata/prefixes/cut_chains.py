"""Prefixes whose first blocks are gone, as a sliding window gives them back.

Without a window a block is known by its parent, which is there as long as the block: a
prompt is proved from its first block on. With one the parents are gone before their
children. So each block is known by itself: by its own tokens, and by two hashes more of
all tokens before it. Three words of 32 bits tell prefixes apart that a domain knows.

A prompt then needs what its next row sees, and the sinks; nothing before is asked for.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import gaps, tables
from jkv.metadata.prefixes import hashing
from jkv.metadata.prefixes.prefix_index import index_of, tokens_of
from jkv.state import Metadata


def hash_prompts(
    metadata: Metadata, whole: jax.Array, column: jax.Array, salts: jax.Array
) -> jax.Array | None:
    """Return the wide hashes of prompts up to each column's end, u32[B, C, 2].

    Args:
      metadata: with an index; None is returned without a window.
      whole: i32[B, C, T], tokens of the columns.
      column: i32[1, C].
      salts: i32[B].
    """
    if metadata.window is None:
        return None
    terms = hashing.wide_column_hash(whole, column)
    sums = jnp.cumsum(terms, axis=1, dtype=jnp.uint32)
    return hashing.wide_salt_hash(salts)[:, None] + sums


def find_reach(metadata: Metadata, is_found: jax.Array) -> jax.Array:
    """Return how many columns of prompts are found, i32[B]: what is seen must be there.

    Args:
      metadata: with a window.
      is_found: bool[B, C], columns that the index has.
    """
    num_columns = is_found.shape[1]
    column = jnp.arange(num_columns, dtype=jnp.int32)[None]
    missing = jnp.where(is_found, -1, column)
    last_missing = jax.lax.cummax(missing, axis=1)
    first_missing = jnp.min(
        jnp.where(is_found, num_columns, column), axis=1, initial=num_columns
    )
    end = column + 1
    sinks = gaps.num_sink_columns(metadata, gaps.window_of(metadata))
    seen_from = gaps.find_unseen(metadata, end * metadata.block_size) + sinks
    has_window = last_missing < seen_from
    has_sinks = first_missing[:, None] >= jnp.minimum(sinks, end)
    return jnp.max(jnp.where(has_window & has_sinks, end, 0), axis=1, initial=0)


class Kept(NamedTuple):
    """What sequences of some tokens would have kept."""

    columns: jax.Array  # bool[B, C]
    gap: jax.Array  # i32[B], columns given back


def find_kept(metadata: Metadata, num_tokens: jax.Array, num_columns: int) -> Kept:
    """Return what sequences that begin with so many tokens, i32[B], need of them."""
    gap = gaps.find_unseen(metadata, num_tokens)
    column = jnp.arange(num_columns, dtype=jnp.int32)[None]
    sinks = gaps.num_sink_columns(metadata, gaps.window_of(metadata))
    is_kept = (column < sinks) | (column >= sinks + gap[:, None])
    return Kept(is_kept, gap)


def is_child(
    metadata: Metadata,
    child: jax.Array,
    column: jax.Array,
    tip_hash: jax.Array,
    tip_wide: jax.Array,
) -> jax.Array:
    """Return which blocks follow prefixes, bool[B, K].

    Args:
      metadata: with an index and a window.
      child: i32[B, K], blocks.
      column: i32[B], their place.
      tip_hash: u32[B], of the prefix before them.
      tip_wide: u32[B, 2], its wide hashes.
    """
    prefix = index_of(metadata)
    assert prefix.wide_hashes is not None
    tokens = tokens_of(metadata).at[child].get(mode="clip")
    above = prefix.hashes.at[child].get(mode="clip")
    above -= hashing.column_hash(tokens, column[:, None])
    wide = prefix.wide_hashes.at[child].get(mode="clip")
    wide -= hashing.wide_column_hash(tokens, column[:, None])
    return (above == tip_hash[:, None]) & jnp.all(wide == tip_wide[:, None], axis=-1)


def has_block_before(
    metadata: Metadata, seq_ids: jax.Array, column: jax.Array
) -> jax.Array | bool:
    """Return whether the block before a column of sequences is there, bool[B]."""
    if metadata.window is None:
        return True
    before = tables.blocks_at(metadata, jnp.maximum(seq_ids, 0), column - 1)
    return (column == 0) | (before < metadata.num_blocks)


def hash_lanes(
    metadata: Metadata,
    salts: jax.Array,
    tokens: jax.Array,
    column: jax.Array,
    before: jax.Array,
    first_lane: jax.Array | None,
) -> jax.Array:
    """Return the wide hashes up to the end of the lanes' blocks, u32[P, 2].

    Args:
      metadata: with an index and a window.
      salts: i32[P].
      tokens: i32[P, T], of the blocks.
      column: i32[P], their places.
      before: i32[P], the block before each, which counts for first lanes.
      first_lane: i32[P], where the request of each lane begins; None: all are alone.
    """
    known = index_of(metadata).wide_hashes
    assert known is not None
    above = jnp.where(
        (column == 0)[:, None],
        hashing.wide_salt_hash(salts),
        known.at[before].get(mode="clip"),
    )
    terms = hashing.wide_column_hash(tokens, column)
    if first_lane is None:
        return above + terms
    sums = jnp.cumsum(terms, axis=0, dtype=jnp.uint32)
    return (above + terms - sums)[first_lane] + sums
