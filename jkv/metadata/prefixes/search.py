"""Looking prompts up in the prefix index."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata.prefixes import hashing, prefix_index
from jkv.state import Metadata


class Found(NamedTuple):
    """What the index has of each of B prompts, in C whole blocks and a part."""

    blocks: jax.Array  # i32[B, C], the block of each column, N where none is found
    num_blocks: jax.Array  # i32[B], leading columns found
    part: jax.Array  # i32[B], a block that begins like what follows, N if there is none
    num_part: jax.Array  # i32[B], tokens they have in common, below T

    def num_tokens(self, block_size: int) -> jax.Array:
        """Return the tokens found, i32[B]."""
        return self.num_blocks * block_size + self.num_part


def find(metadata: Metadata, tokens: jax.Array, salts: jax.Array) -> Found:
    """Look up prompts; the last token of each is never found.

    Args:
      metadata: with an index.
      tokens: i32[B, P], negative from each prompt's end on.
      salts: i32[B].
    """
    prefix = prefix_index.index_of(metadata)
    size, nothing = metadata.block_size, metadata.num_blocks
    num_requests, width = tokens.shape
    num_columns = min(width // size, metadata.max_blocks_per_sequence)
    place = jnp.arange(width, dtype=jnp.int32)[None]
    length = jnp.min(jnp.where(tokens < 0, place, width), axis=1, initial=width)
    usable = jnp.clip(length - 1, 0, metadata.max_context_length)

    # All columns at once: hash, one bucket each, and the proof of what it proposes.
    whole = tokens[:, : num_columns * size].reshape(num_requests, num_columns, size)
    column = jnp.arange(num_columns, dtype=jnp.int32)[None]
    start = hashing.salt_hash(salts)
    sums = jnp.cumsum(hashing.column_hash(whole, column), axis=1, dtype=jnp.uint32)
    hashes = start[:, None] + sums
    proposed = prefix_index.look_up(prefix, hashes)
    before = jnp.concatenate(
        [jnp.full((num_requests, 1), nothing, jnp.int32), proposed[:, :-1]], axis=1
    )[:, :num_columns]
    is_found = (
        ((column + 1) * size <= usable[:, None])
        & prefix_index.is_same(metadata, proposed, whole, salts[:, None])
        & (prefix.parents.at[proposed].get(mode="clip") == before)
    )
    missing = jnp.where(is_found, num_columns, column)
    num_found = jnp.min(missing, axis=1, initial=num_columns)
    blocks = jnp.where(column < num_found[:, None], proposed, nothing)

    # What follows the last hit: the child of it that has most in common.
    last = num_found[:, None] - 1
    tip = _at(blocks, last, nothing)
    tip_hash = jnp.where(num_found > 0, _at(hashes, last, np.uint32(0)), start)
    rest_at = num_found[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    rest = _at_each(tokens, rest_at, -1)
    at_most = jnp.minimum(usable - num_found * size, size - 1)
    child = prefix.children[prefix_index.row_of(prefix.children, ~tip_hash)]
    is_child = (
        (prefix.hashes.at[child].get(mode="fill", fill_value=0) != 0)
        & (prefix.parents.at[child].get(mode="clip") == tip[:, None])
        & (prefix.salts.at[child].get(mode="clip") == salts[:, None])
    )
    theirs = prefix_index.tokens_of(metadata)[jnp.minimum(child, nothing - 1)]
    offset = jnp.arange(size, dtype=jnp.int32)[None, None]
    differs = (theirs != rest[:, None]) | (offset >= at_most[:, None, None])
    common = jnp.min(jnp.where(differs, offset, size), axis=2)
    common = jnp.where(is_child, common, 0)
    best = jnp.argmax(common, axis=1)[:, None].astype(jnp.int32)
    num_part = _at(common, best, 0)
    part = jnp.where(num_part > 0, _at(child, best, nothing), nothing)
    return Found(blocks, num_found, part, num_part)


def _at(rows: jax.Array, index: jax.Array, nothing: int | np.uint32) -> jax.Array:
    """Return the entry of each row, [B, C], at its index, i32[B, 1], as [B]."""
    return _at_each(rows, index, nothing)[:, 0]


def _at_each(rows: jax.Array, index: jax.Array, nothing: int | np.uint32) -> jax.Array:
    """Return entries of each row, [B, C], at i32[B, K]; `nothing` where out of it."""
    inside = (index >= 0) & (index < rows.shape[1])
    if rows.shape[1] == 0:
        return jnp.full(index.shape, nothing, rows.dtype)
    taken = jnp.take_along_axis(rows, jnp.clip(index, 0, rows.shape[1] - 1), axis=1)
    return jnp.where(inside, taken, jnp.asarray(nothing, rows.dtype))
