"""Looking prompts up in the prefix index, and starting sequences with what is found."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata import counters, gaps, tables
from jkv.metadata.prefixes import (
    cut_chains,
    hash_tables,
    hashing,
    holes,
    sequences,
)
from jkv.metadata.prefixes.prefix_index import if_indexed, index_of, tokens_of
from jkv.metadata.tails import BlockCopies, copy_tokens
from jkv.state import Metadata
from jkv.status import Counter


class Found(NamedTuple):
    """What the index has of each of B prompts, in C whole blocks and a part.

    Without an index, or without prompts, there are no columns and nothing is found.
    """

    blocks: jax.Array  # i32[B, C], the block of each column, N where none is found
    num_blocks: jax.Array  # i32[B], leading columns found
    part: jax.Array  # i32[B], a block that begins like what follows, N if there is none
    num_part: jax.Array  # i32[B], tokens they have in common, below T
    # i32[B], of the leading columns those that nothing needs; None without a window
    gap: jax.Array | None = None

    def num_tokens(self, block_size: int) -> jax.Array:
        """Return the tokens found, i32[B]."""
        return self.num_blocks * block_size + self.num_part


class _Prompts(NamedTuple):
    """B prompts of P columns at most."""

    tokens: jax.Array  # i32[B, P], negative from each prompt's end on
    salts: jax.Array  # i32[B]
    usable: jax.Array  # i32[B], tokens that may be found: never the last


def find(metadata: Metadata, tokens: jax.Array | None, salts: jax.Array) -> Found:
    """Look up prompts; the last token of each is never found.

    Args:
      metadata: the state.
      tokens: i32[B, P], negative from each prompt's end on.
      salts: i32[B].
    """
    if metadata.prefix is None or tokens is None:
        none = jnp.zeros(salts.shape, jnp.int32)
        nowhere = jnp.full(salts.shape, metadata.num_blocks, jnp.int32)
        return Found(jnp.zeros((*salts.shape, 0), jnp.int32), none, nowhere, none)
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    ends = jnp.where(tokens < 0, place, tokens.shape[1])
    length = jnp.min(ends, axis=1, initial=tokens.shape[1])
    usable = jnp.clip(length - 1, 0, metadata.max_context_length)
    prompts = _Prompts(tokens, salts, usable)
    blocks, num_blocks, tip = _find_whole(metadata, prompts)
    part, num_part = _find_part(metadata, prompts, num_blocks, tip)
    found = Found(blocks, num_blocks, part, num_part)
    if metadata.window is None:
        return found
    num_tokens = found.num_tokens(metadata.block_size)
    kept = cut_chains.find_kept(metadata, num_tokens, blocks.shape[1])
    blocks = jnp.where(kept.columns, blocks, metadata.num_blocks)
    return found._replace(blocks=blocks, gap=kept.gap)


class _Tip(NamedTuple):
    """The end of what was found whole of B prompts."""

    block: jax.Array  # i32[B], the last block, N for none
    hash: jax.Array  # u32[B], of the prefix up to its end
    wide: jax.Array | None  # u32[B, 2], more hashes of it, with a window


def _find_whole(
    metadata: Metadata, prompts: _Prompts
) -> tuple[jax.Array, jax.Array, _Tip]:
    """Find leading blocks of prompts: all columns at once, the proof after the guess.

    Returns:
      i32[B, C] blocks, N from the first column not found; i32[B], columns found; and
      the end of the prefix that they make.
    """
    prefix = index_of(metadata)
    size, nothing = metadata.block_size, metadata.num_blocks
    num_requests, width = prompts.tokens.shape
    num_columns = min(width // size, metadata.max_blocks_per_sequence)
    whole = prompts.tokens[:, : num_columns * size]
    whole = whole.reshape(num_requests, num_columns, size)
    column = jnp.arange(num_columns, dtype=jnp.int32)[None]
    start = hashing.salt_hash(prompts.salts)
    sums = jnp.cumsum(hashing.column_hash(whole, column), axis=1, dtype=jnp.uint32)
    hashes = start[:, None] + sums

    proposed = hash_tables.look_up(prefix, hashes)
    wide = cut_chains.hash_prompts(metadata, whole, column, prompts.salts)
    is_found = ((column + 1) * size <= prompts.usable[:, None]) & hash_tables.is_same(
        metadata, proposed, whole, prompts.salts[:, None], wide
    )
    if wide is None:
        first = jnp.full((num_requests, 1), nothing, jnp.int32)
        before = jnp.concatenate([first, proposed[:, :-1]], axis=1)[:, :num_columns]
        is_found &= prefix.parents.at[proposed].get(mode="clip") == before
        missing = jnp.where(is_found, num_columns, column)
        num_found = jnp.min(missing, axis=1, initial=num_columns)
    else:
        num_found = cut_chains.find_reach(metadata, is_found)
    blocks = jnp.where(column < num_found[:, None], proposed, nothing)
    last = num_found[:, None] - 1
    tip_hash = jnp.where(num_found > 0, _at(hashes, last, np.uint32(0)), start)
    if wide is not None:
        words = [_at(wide[..., i], last, np.uint32(0)) for i in range(2)]
        wide = jnp.where(
            num_found[:, None] > 0,
            jnp.stack(words, axis=-1),
            hashing.wide_salt_hash(prompts.salts),
        )
    return blocks, num_found, _Tip(_at(blocks, last, nothing), tip_hash, wide)


def _find_part(
    metadata: Metadata,
    prompts: _Prompts,
    num_found: jax.Array,
    tip: _Tip,
) -> tuple[jax.Array, jax.Array]:
    """Find the child of the last block found that begins most like what follows it.

    Args:
      metadata: with an index.
      prompts: the prompts.
      num_found: i32[B], columns found.
      tip: the last block found, and the prefix up to its end.

    Returns:
      i32[B], the child, N for none; and i32[B], the tokens in common.
    """
    prefix = index_of(metadata)
    size, nothing = metadata.block_size, metadata.num_blocks
    offset = jnp.arange(size, dtype=jnp.int32)[None]
    rest = _at_each(prompts.tokens, num_found[:, None] * size + offset, -1)
    at_most = jnp.minimum(prompts.usable - num_found * size, size - 1)
    child = prefix.children[hash_tables.row_of(prefix.children, ~tip.hash)]
    is_child = (prefix.hashes.at[child].get(mode="fill", fill_value=0) != 0) & (
        prefix.salts.at[child].get(mode="clip") == prompts.salts[:, None]
    )
    if tip.wide is None:
        is_child &= prefix.parents.at[child].get(mode="clip") == tip.block[:, None]
    else:
        is_child &= cut_chains.is_child(metadata, child, num_found, tip.hash, tip.wide)
    theirs = tokens_of(metadata)[jnp.minimum(child, nothing - 1)]
    offset = offset[None]
    differs = (theirs != rest[:, None]) | (offset >= at_most[:, None, None])
    common = jnp.min(jnp.where(differs, offset, size), axis=2)
    common = jnp.where(is_child, common, 0)
    best = jnp.argmax(common, axis=1)[:, None].astype(jnp.int32)
    num_part = _at(common, best, 0)
    return jnp.where(num_part > 0, _at(child, best, nothing), nothing), num_part


@if_indexed
def share(metadata: Metadata, row: jax.Array, found: Found) -> Metadata:
    """Enter the whole blocks found in table rows, i32[B]; one of S or above is dropped.

    They get an owner more each, so a cached one is not taken by others any more.
    """
    is_served = (row < metadata.max_sequences)[:, None]
    blocks = jnp.where(is_served, found.blocks, metadata.num_blocks)
    columns = jnp.arange(blocks.shape[1], dtype=jnp.int32)[None]
    rows = jnp.where(blocks < metadata.num_blocks, row[:, None], metadata.max_sequences)
    tables = metadata.block_tables.at[rows, columns].set(blocks, mode="drop")
    metadata = dataclasses.replace(metadata, block_tables=tables)
    if found.gap is not None:
        metadata = gaps.set_gap(metadata, row, found.gap)
    return holes.add_references(metadata, blocks.reshape(-1))


def copy_part(
    metadata: Metadata, row: jax.Array, found: Found
) -> tuple[Metadata, BlockCopies | None]:
    """Have the part of a block that was found copied into the first fresh one.

    Args:
      metadata: the state; the fresh blocks are mapped already.
      row: i32[B], table rows; one of S or above gets no copy.
      found: what was found.

    Returns:
      The metadata, tokens copied, and the copies due in storage, None without an index.
    """
    if metadata.prefix is None:
        return metadata, None
    fresh = tables.blocks_at(metadata, row, found.num_blocks)
    target = jnp.where(found.num_part > 0, fresh, metadata.num_blocks)
    copies = BlockCopies(jnp.minimum(found.part, metadata.num_blocks - 1), target)
    return copy_tokens(metadata, copies), copies


@if_indexed
def note_found(
    metadata: Metadata, row: jax.Array, salts: jax.Array, num_cached: jax.Array
) -> Metadata:
    """Let rows, i32[B], of domains, i32[B], begin with the tokens found, i32[B]."""
    lengths = metadata.context_lengths.at[row].set(num_cached, mode="drop")
    metadata = dataclasses.replace(metadata, context_lengths=lengths)
    return sequences.note_opened(metadata, row, salts, num_cached)


@if_indexed
def count_queries(
    metadata: Metadata,
    served: jax.Array,
    tokens: jax.Array | None,
    num_cached: jax.Array,
) -> Metadata:
    """Count the prompts of served requests, their tokens, and those found.

    Args:
      metadata: the state.
      served: bool[B].
      tokens: i32[B, P], or None where no request brought a prompt.
      num_cached: i32[B].
    """
    if tokens is None:
        return metadata
    asked = (tokens >= 0) & served[:, None]
    sums = {
        Counter.PREFIX_QUERIES: jnp.sum(served, dtype=jnp.int32),
        Counter.PREFIX_TOKENS: jnp.sum(asked, dtype=jnp.int32),
        Counter.PREFIX_HITS: jnp.sum(num_cached, dtype=jnp.int32),
    }
    return counters.add(metadata, sums)


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
