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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv import counters
from jkv.state import Metadata, PrefixIndex

# Odd constants that spread bits: the golden ratio's, and those of MurmurHash3's
# finaliser (A. Appleby, public domain).
_GOLDEN = np.uint32(0x9E3779B9)
_MIX = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))


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
    prefix = index_of(metadata)
    size, nothing = metadata.block_size, metadata.num_blocks
    num_requests, width = tokens.shape
    num_columns = min(width // size, metadata.max_blocks_per_sequence)
    place = jnp.arange(width, dtype=jnp.int32)[None]
    length = jnp.min(jnp.where(tokens < 0, place, width), axis=1, initial=width)
    usable = jnp.clip(length - 1, 0, metadata.max_context_length)

    # All columns at once: hash, one bucket each, and the proof of what it proposes.
    whole = tokens[:, : num_columns * size].reshape(num_requests, num_columns, size)
    column = jnp.arange(num_columns, dtype=jnp.int32)[None]
    start = salt_hash(salts)
    sums = jnp.cumsum(column_hash(whole, column), axis=1, dtype=jnp.uint32)
    hashes = start[:, None] + sums
    proposed = look_up(prefix, hashes)
    before = jnp.concatenate(
        [jnp.full((num_requests, 1), nothing, jnp.int32), proposed[:, :-1]], axis=1
    )[:, :num_columns]
    is_found = (
        ((column + 1) * size <= usable[:, None])
        & is_same(metadata, proposed, whole, salts[:, None])
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
    child = prefix.children[_row(prefix.children, ~tip_hash)]
    is_child = (
        (prefix.hashes.at[child].get(mode="fill", fill_value=0) != 0)
        & (prefix.parents.at[child].get(mode="clip") == tip[:, None])
        & (prefix.salts.at[child].get(mode="clip") == salts[:, None])
    )
    theirs = tokens_of(metadata)[jnp.minimum(child, nothing - 1)]
    offset = jnp.arange(size, dtype=jnp.int32)[None, None]
    differs = (theirs != rest[:, None]) | (offset >= at_most[:, None, None])
    common = jnp.min(jnp.where(differs, offset, size), axis=2)
    common = jnp.where(is_child, common, 0)
    best = jnp.argmax(common, axis=1)[:, None].astype(jnp.int32)
    num_part = _at(common, best, 0)
    part = jnp.where(num_part > 0, _at(child, best, nothing), nothing)
    return Found(blocks, num_found, part, num_part)


def insert(
    metadata: Metadata,
    block: jax.Array,
    hashes: jax.Array,
    tokens: jax.Array,
    salts: jax.Array,
    may_enter: jax.Array,
) -> tuple[Metadata, jax.Array]:
    """Find each block's equal in the index, or else enter the block itself.

    Of several equal blocks in one call the first enters. A block stays out if its
    bucket is full, or if its hash is taken by other tokens. Parents are not looked at,
    and are the caller's to set.

    Args:
      metadata: with an index.
      block: i32[P], distinct.
      hashes: u32[P], of the prefix that each block ends.
      tokens: i32[P, T].
      salts: i32[P].
      may_enter: bool[P], False for a block that is only looked for.

    Returns:
      The metadata, and i32[P]: the block that stands for each, N where none does.
    """
    nothing = metadata.num_blocks
    lane = jnp.arange(block.shape[0], dtype=jnp.int32)
    row = _row(index_of(metadata).buckets, hashes)
    Carry = tuple[PrefixIndex, jax.Array, jax.Array]

    # In each round every block without an answer looks again and claims a free place;
    # the first of those that claim the same place gets it. Rarely more than two rounds.
    def round_(state: Carry) -> Carry:
        prefix, answer, pending = state
        equal = look_up(prefix, hashes)
        now = dataclasses.replace(metadata, prefix=prefix)
        is_equal = is_same(now, equal, tokens, salts)
        answer = jnp.where(pending & is_equal, equal, answer)
        # (That an equal one is none says nothing new, but has all reads come before the
        # writes below: XLA would keep copies of the arrays for them.)
        pending &= may_enter & (equal == nothing) & ~is_equal
        bucket = prefix.buckets[row]
        is_free = _is_free_place(prefix, bucket, row)
        pending &= jnp.any(is_free, axis=1)
        column = jnp.argmax(is_free, axis=1).astype(jnp.int32)
        buckets, wins = _claim(prefix.buckets, row, column, block, pending)
        won = jnp.where(wins, block, nothing)
        prefix = dataclasses.replace(
            prefix,
            buckets=buckets,
            hashes=prefix.hashes.at[won].set(hashes, mode="drop"),
            salts=prefix.salts.at[won].set(salts, mode="drop"),
        )
        return prefix, jnp.where(wins, block, answer), pending & ~wins

    prefix, answer, _ = jax.lax.while_loop(
        lambda state: jnp.any(state[2]),
        round_,
        (
            index_of(metadata),
            jnp.full_like(block, nothing),
            (lane >= 0) & (block < nothing),
        ),
    )
    return dataclasses.replace(metadata, prefix=prefix), answer


def insert_children(
    prefix: PrefixIndex, block: jax.Array, parent_hash: jax.Array
) -> PrefixIndex:
    """List blocks, i32[P], under their parents' hashes, u32[P]; N is dropped.

    A row that is full gives up one of its places.
    """
    table = prefix.children
    row = _row(table, ~parent_hash)
    victim = (prefix.hashes.at[block].get(mode="clip") % table.shape[1]).astype(
        jnp.int32
    )

    def round_(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        children, pending = state
        listed = children[row]
        is_free = _is_free_child(prefix, listed, row)
        column = jnp.argmax(is_free, axis=1).astype(jnp.int32)
        column = jnp.where(jnp.any(is_free, axis=1), column, victim)
        children, wins = _claim(children, row, column, block, pending)
        return children, pending & ~wins

    children, _ = jax.lax.while_loop(
        lambda state: jnp.any(state[1]),
        round_,
        (table, block < prefix.hashes.shape[0]),
    )
    return dataclasses.replace(prefix, children=children)


def forget(prefix: PrefixIndex, block: jax.Array) -> PrefixIndex:
    """Take blocks, i32[P], out of the index; N is dropped."""
    hashes = prefix.hashes.at[block].set(jnp.uint32(0), mode="drop")
    return dataclasses.replace(prefix, hashes=hashes)


def open_sequences(
    metadata: Metadata, row: jax.Array, salts: jax.Array, committed: jax.Array
) -> Metadata:
    """Note the domain of opened rows, i32[B], and the tokens found for them."""
    prefix = metadata.prefix
    if prefix is None:
        return metadata
    stamp = counters.now(metadata) + jnp.uint32(1)
    prefix = dataclasses.replace(
        prefix,
        committed=prefix.committed.at[row].set(committed, mode="drop"),
        sequence_salts=prefix.sequence_salts.at[row].set(salts, mode="drop"),
        epochs=prefix.epochs.at[row].set(stamp, mode="drop"),
    )
    return dataclasses.replace(metadata, prefix=prefix)


def inherit(
    metadata: Metadata, before: Metadata, row: jax.Array, parents: jax.Array
) -> Metadata:
    """Let rows, i32[B], continue from what the parents' had been in `before`."""
    if before.prefix is None:
        return metadata
    return open_sequences(
        metadata,
        row,
        before.prefix.sequence_salts.at[parents].get(mode="clip"),
        before.prefix.committed.at[parents].get(mode="clip"),
    )


def cut_back(metadata: Metadata, row: jax.Array, lengths: jax.Array) -> Metadata:
    """Note that rows, i32[B], hold no more than these tokens, i32[B], any longer."""
    prefix = metadata.prefix
    if prefix is None:
        return metadata
    committed = jnp.minimum(prefix.committed.at[row].get(mode="clip"), lengths)
    # An empty sequence holds nothing that could be out of date.
    committed = jnp.where(lengths == 0, 0, committed)
    salts = prefix.sequence_salts.at[row].get(mode="clip")
    return open_sequences(metadata, row, salts, committed)


def epochs(metadata: Metadata, seq_ids: jax.Array) -> jax.Array | None:
    """Return when each sequence was opened or last cut back, u32[B], with an index."""
    if metadata.prefix is None:
        return None
    return metadata.prefix.epochs.at[seq_ids].get(mode="clip")


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


def look_up(prefix: PrefixIndex, hashes: jax.Array) -> jax.Array:
    """Return the indexed block with each hash, i32[...], N where there is none."""
    bucket = prefix.buckets[_row(prefix.buckets, hashes)]
    theirs = prefix.hashes.at[bucket].get(mode="fill", fill_value=0)
    # 0 marks what is not indexed; a prefix with that hash is never found.
    hit = (theirs == hashes[..., None]) & (hashes != 0)[..., None]
    nothing = prefix.hashes.shape[0]
    return jnp.min(jnp.where(hit, bucket, nothing), axis=-1)


def is_same(
    metadata: Metadata, block: jax.Array, tokens: jax.Array, salts: jax.Array
) -> jax.Array:
    """Return whether indexed blocks, [...], have these tokens, [..., T], and salts."""
    same = jnp.all(
        tokens_of(metadata).at[block].get(mode="clip") == tokens, axis=block.ndim
    )
    theirs = index_of(metadata).salts.at[block].get(mode="clip")
    return (block < metadata.num_blocks) & same & (theirs == salts)


def salt_hash(salts: jax.Array) -> jax.Array:
    """Return the hash of an empty prefix in each domain, u32[...]."""
    return _mixed(_bits(salts) + _GOLDEN)


def column_hash(tokens: jax.Array, column: jax.Array) -> jax.Array:
    """Return what a block adds to the hash of its prefix, u32[...].

    Args:
      tokens: i32[..., T].
      column: i32[...], the block's place in its sequence.
    """
    size = tokens.shape[-1]
    weights = np.arange(1, size + 1, dtype=np.uint32) * _GOLDEN
    terms = _mixed(_bits(tokens) ^ weights.reshape((1,) * (tokens.ndim - 1) + (size,)))
    block = jnp.sum(terms, axis=-1, dtype=jnp.uint32)
    return _mixed(block ^ (_bits(column + 1) * _GOLDEN))


def _claim(
    table: jax.Array,
    row: jax.Array,
    column: jax.Array,
    block: jax.Array,
    claims: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Write each block that claims a place there, the first where several do.

    Returns:
      The table, and bool[P]: who got the place.
    """
    lane = jnp.arange(block.shape[0], dtype=jnp.int32)
    row = jnp.where(claims, row, table.shape[0])
    # The places themselves tell who is first; nobody else needs them meanwhile.
    table = table.at[row, column].set(block.shape[0], mode="drop")
    table = table.at[row, column].min(lane, mode="drop")
    wins = claims & (table.at[row, column].get(mode="fill", fill_value=-1) == lane)
    row = jnp.where(wins, row, table.shape[0])
    return table.at[row, column].set(block, mode="drop"), wins


def _is_free_place(prefix: PrefixIndex, bucket: jax.Array, row: jax.Array) -> jax.Array:
    """Return which places of buckets, i32[P, W], name nothing that is indexed there."""
    hashes = prefix.hashes.at[bucket].get(mode="fill", fill_value=0)
    is_stale = (hashes == 0) | (_row(prefix.buckets, hashes) != row[:, None])
    return is_stale | _is_repeated(bucket)


def _is_free_child(prefix: PrefixIndex, listed: jax.Array, row: jax.Array) -> jax.Array:
    """Return which places, i32[P, W], name nothing that is a child listed there."""
    hashes = prefix.hashes.at[listed].get(mode="fill", fill_value=0)
    parent = prefix.parents.at[listed].get(mode="clip")
    root = salt_hash(prefix.salts.at[listed].get(mode="clip"))
    above = prefix.hashes.at[parent].get(mode="fill", fill_value=0)
    above = jnp.where(parent < prefix.hashes.shape[0], above, root)
    is_stale = (hashes == 0) | (_row(prefix.children, ~above) != row[:, None])
    return is_stale | _is_repeated(listed)


def _is_repeated(ids: jax.Array) -> jax.Array:
    """Return which ids of each row, i32[P, W], stand further left in it, too."""
    earlier = np.tri(ids.shape[1], k=-1, dtype=bool)[None]
    return jnp.any((ids[:, :, None] == ids[:, None, :]) & earlier, axis=2)


def _row(table: jax.Array, hashes: jax.Array) -> jax.Array:
    """Return the row of a hash table for each hash, i32[...]."""
    return (_mixed(hashes) % np.uint32(table.shape[0])).astype(jnp.int32)


def _mixed(bits: jax.Array) -> jax.Array:
    """Spread every bit over all of u32[...]: MurmurHash3's finaliser."""
    for shift, factor in ((16, _MIX[0]), (13, _MIX[1])):
        bits = (bits ^ (bits >> np.uint32(shift))) * factor
    return bits ^ (bits >> np.uint32(16))


def _bits(integers: jax.Array) -> jax.Array:
    """Return the bits of i32[...] as u32[...]."""
    return jax.lax.bitcast_convert_type(integers, jnp.uint32)


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
