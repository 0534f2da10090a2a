"""Look-up of prompts in the prefix index.

The hit ends where every group of layers can continue: full attention needs all blocks,
a sliding window its last ones. The keys of the leading group's blocks also prove the
contents of their partners.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.operations import gather, scatter
from jkv.prefixes import hash_tables, hashing, proofs
from jkv.prefixes.hash_tables import Prefixes
from jkv.prefixes.prefix_index import find_partners, index_of, tokens_of
from jkv.prefixes.proofs import Tip
from jkv.prefixes.snapshots import find_common, find_longest, snapshots_of, state_at
from jkv.state import Metadata
from jkv.state.index import Found, FoundBlocks, FoundState, find_nothing


class _Prompts(NamedTuple):
    """B prompts of at most P columns."""

    tokens: jax.Array  # i32[B, P], negative from the end of each prompt on
    salts: jax.Array  # i32[B]
    usable: jax.Array  # i32[B], tokens that may be found, excluding the last


class _Whole(NamedTuple):
    """Leading columns found of B prompts."""

    # By group i32[B, C], N for unknown columns.
    blocks: dict[int, jax.Array]
    num: jax.Array  # i32[B], columns after which all groups can continue
    tip: Tip | None  # their end, in the leading group; None with states
    state: FoundState | None  # the snapshot at their end; None without states


def find(
    metadata: Metadata,
    tokens: jax.Array | None,
    salts: jax.Array,
    recomputes_last: bool = False,
) -> Found:
    """Look up prompts, i32[B, P], padded with -1, except the last token of each.

    With `recomputes_last` the last token found does not count, unless there are states,
    which cannot be cut by a token. Its block is copied, with the keys that it has.
    """
    if tokens is None:
        return find_nothing(metadata, salts.shape)
    prompts = _measure(metadata, tokens, salts)
    again = int(recomputes_last)
    whole = _find_whole(metadata, prompts, again)
    parts, num_part = _find_part(metadata, prompts, whole)
    num_again = None
    if recomputes_last and whole.tip is not None:
        whole, parts, num_part = _copy_last(metadata, whole, parts, num_part)
        num_again = (num_part > 0).astype(jnp.int32)
    num_tokens = whole.num * metadata.block_size + num_part
    if num_again is not None:
        num_tokens -= num_again
    groups = {}
    for number, blocks in whole.blocks.items():
        group, part = metadata.groups[number], parts[number]
        num_columns = blocks.shape[1]
        column = jnp.arange(num_columns, dtype=jnp.int32)[None]
        needs = group.window.needs(num_tokens, num_columns, group.block_size)
        needed = (column < whole.num[:, None]) & needs
        blocks = jnp.where(needed, blocks, group.num_blocks)
        gap = group.window.unseen_from(num_tokens, group.block_size)
        groups[number] = FoundBlocks(blocks, gap, part)
    return Found(whole.num, num_part, groups, whole.state, num_again)


def _copy_last(
    metadata: Metadata, whole: _Whole, parts: dict[int, jax.Array], num_part: jax.Array
) -> tuple[_Whole, dict[int, jax.Array], jax.Array]:
    """Copy the last whole block found instead of sharing it, where nothing follows."""
    is_copied = (num_part == 0) & (whole.num > 0)
    last = whole.num[:, None] - 1
    parts = {
        i: jnp.where(is_copied, _at(blocks, last, metadata.groups[i].num_blocks), part)
        for (i, blocks), part in zip(whole.blocks.items(), parts.values(), strict=True)
    }
    num_part = jnp.where(is_copied, metadata.block_size, num_part)
    num = whole.num - is_copied.astype(jnp.int32)
    return whole._replace(num=num), parts, num_part


def _measure(metadata: Metadata, tokens: jax.Array, salts: jax.Array) -> _Prompts:
    """Return the prompts with the number of tokens that may be found."""
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    ends = jnp.where(tokens < 0, position, tokens.shape[1])
    length = jnp.min(ends, axis=1, initial=tokens.shape[1])
    usable = jnp.clip(length - 1, 0, metadata.max_context_length)
    return _Prompts(tokens, salts, usable)


def find_divergence(
    metadata: Metadata, tokens: jax.Array, salts: jax.Array
) -> jax.Array | None:
    """Return the divergence point of prompts, i32[B, P], from known sequences."""
    if snapshots_of(metadata) is None:
        return None
    return _find_divergence(metadata, tokens, salts)


def find_divergence_after(
    metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array, tokens: jax.Array
) -> jax.Array | None:
    """Return the same for sequences' first tokens, i32[B], followed by `tokens`."""
    snapshots = snapshots_of(metadata)
    if snapshots is None:
        return None
    known = gather(snapshots.sequence_tokens, seq_ids)
    num_sequences, most = known.shape
    position = jnp.arange(most, dtype=jnp.int32)[None]
    known = jnp.where(position < lengths[:, None], known, -1)
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    at = jnp.where(tokens >= 0, lengths[:, None] + column, most)
    row = jnp.arange(num_sequences, dtype=jnp.int32)[:, None]
    whole = scatter(known, (row, at), tokens)
    salts = index_of(metadata).read(seq_ids).salt
    return _find_divergence(metadata, whole, salts)


@jax.jit
def _find_divergence(
    metadata: Metadata, tokens: jax.Array, salts: jax.Array
) -> jax.Array:
    if not metadata.block_numbers:
        return find_common(metadata, tokens, salts)
    prompts = _measure(metadata, tokens, salts)
    block, _ = _look_up(metadata, prompts, _hash_columns(metadata, prompts))
    is_known = jnp.cumprod((block < metadata.leading.num_blocks).astype(jnp.int32), 1)
    return jnp.sum(is_known, axis=1, dtype=jnp.int32) * metadata.block_size


class _Hashed(NamedTuple):
    """Whole columns of prompts, and hashes of the prefixes up to their ends."""

    tokens: jax.Array  # i32[B, C, T]
    column: jax.Array  # i32[1, C]
    start: jax.Array  # u32[B], of the empty prefix
    hashes: jax.Array  # u32[B, C]


def _hash_columns(metadata: Metadata, prompts: _Prompts) -> _Hashed:
    size, (num_requests, width) = metadata.block_size, prompts.tokens.shape
    num_columns = min(width // size, metadata.max_blocks_per_sequence)
    whole = prompts.tokens[:, : num_columns * size]
    whole = whole.reshape(num_requests, num_columns, size)
    column = jnp.arange(num_columns, dtype=jnp.int32)[None]
    start = hashing.salt_hash(prompts.salts)
    sums = jnp.cumsum(hashing.column_hash(whole, column), axis=1, dtype=jnp.uint32)
    return _Hashed(whole, column, start, start[:, None] + sums)


def _find_whole(metadata: Metadata, prompts: _Prompts, again: int = 0) -> _Whole:
    """Find leading blocks of prompts, all columns at once.

    Windows must also hold what the last `again` tokens found attend to.
    """
    hashed = _hash_columns(metadata, prompts)
    if snapshots := snapshots_of(metadata):
        goes_on = (hashed.column + 1) * metadata.block_size <= prompts.usable[:, None]
        blocks: dict[int, jax.Array] = {}
        if metadata.block_numbers:
            block, _ = _look_up(metadata, prompts, hashed)
            blocks, reach = _reach(metadata, block, 0)
            goes_on &= reach
        num, snapshot_id = find_longest(
            metadata, snapshots, prompts.tokens, prompts.salts, hashed.hashes, goes_on
        )
        return _Whole(blocks, num, None, state_at(snapshots, snapshot_id))
    block, wide = _look_up(metadata, prompts, hashed)
    blocks, goes_on = _reach(metadata, block, again)
    num = jnp.max(jnp.where(goes_on, hashed.column + 1, 0), axis=1, initial=0)

    last, is_empty = num[:, None] - 1, num == 0
    if wide is not None:
        words = [_at(wide[..., i], last, np.uint32(0)) for i in range(2)]
        wide = jnp.where(
            is_empty[:, None],
            hashing.wide_salt_hash(prompts.salts),
            jnp.stack(words, axis=-1),
        )
    end = jnp.where(is_empty, hashed.start, _at(hashed.hashes, last, np.uint32(0)))
    tip = Tip(_at(block, last, metadata.leading.num_blocks), end, wide)
    return _Whole(blocks, num, tip, None)


def _look_up(
    metadata: Metadata, prompts: _Prompts, hashed: _Hashed
) -> tuple[jax.Array, jax.Array | None]:
    """Return the leader's blocks, i32[B, C], N for none, and wide hashes."""
    index, column = index_of(metadata), hashed.column
    wide = proofs.hash_prompts(index, hashed.tokens, column, prompts.salts)
    nothing, shape = metadata.leading.num_blocks, hashed.hashes.shape
    block = hash_tables.look_up(index, hashed.hashes)
    first = jnp.full((shape[0], 1), nothing, jnp.int32)
    before = jnp.concatenate([first, block[:, :-1]], axis=1)[:, : shape[1]]
    parents = proofs.known_parents(index, before)
    wanted = Prefixes(
        hashed.tokens, prompts.salts[:, None], hashed.hashes, wide, parents
    )
    is_found = (column + 1) * metadata.block_size <= prompts.usable[:, None]
    is_found &= hash_tables.is_same(metadata, block, wanted)
    return jnp.where(is_found, block, nothing), wide


def _reach(
    metadata: Metadata, block: jax.Array, again: int
) -> tuple[dict[int, jax.Array], jax.Array]:  # i32[B, C] by number; bool[B, C]
    """Return the blocks of all groups, and where all groups can continue."""
    blocks = {
        number: find_partners(metadata, number, block)
        for number in metadata.block_numbers
    }
    reaches = [
        group.window.reaches(theirs < group.num_blocks, metadata.block_size, again)
        for group, theirs in zip(metadata.block_groups, blocks.values(), strict=True)
    ]
    return blocks, functools.reduce(operator.and_, reaches)


def _find_part(
    metadata: Metadata, prompts: _Prompts, whole: _Whole
) -> tuple[dict[int, jax.Array], jax.Array]:
    """Find the next block with the longest common prefix: a partial match.

    It is a child of the last block found, with partners in all groups. Return it by
    group, i32[B], N for none, and the common tokens, i32[B]. There is none with states,
    which cannot continue within a block.
    """
    groups = {number: metadata.groups[number] for number in metadata.block_numbers}
    if whole.tip is None:
        none = jnp.zeros(whole.num.shape, jnp.int32)
        return {i: none + group.num_blocks for i, group in groups.items()}, none
    index, size = index_of(metadata), metadata.block_size
    nothing, num = metadata.leading.num_blocks, whole.num
    offset = jnp.arange(size, dtype=jnp.int32)[None]
    rest = _at_each(prompts.tokens, num[:, None] * size + offset, -1)
    at_most = jnp.minimum(prompts.usable - num * size, size - 1)
    child = gather(index.table, hash_tables.child_row_of(index, whole.tip.hash))
    is_child = (
        (gather(index.hashes, child, fill=0) != 0)
        & (gather(index.salts, child) == prompts.salts[:, None])
        & proofs.follows_tip(metadata, child, num, whole.tip)
    )
    children = {number: find_partners(metadata, number, child) for number in groups}
    for number in metadata.followers:
        is_child &= children[number] < metadata.groups[number].num_blocks
    theirs = gather(tokens_of(metadata), jnp.minimum(child, nothing - 1))
    offset = offset[None]
    differs = (theirs != rest[:, None]) | (offset >= at_most[:, None, None])
    common = jnp.min(jnp.where(differs, offset, size), axis=2)
    common = jnp.where(is_child, common, 0)
    best = jnp.argmax(common, axis=1)[:, None].astype(jnp.int32)
    num_part = _at(common, best, 0)
    parts = {
        i: jnp.where(
            num_part > 0, _at(children[i], best, group.num_blocks), group.num_blocks
        )
        for i, group in groups.items()
    }
    return parts, num_part


def _at(rows: jax.Array, index: jax.Array, nothing: int | np.uint32) -> jax.Array:
    """Return the entry of each row, [B, C], at its index, i32[B, 1], as [B]."""
    return _at_each(rows, index, nothing)[:, 0]


def _at_each(rows: jax.Array, index: jax.Array, nothing: int | np.uint32) -> jax.Array:
    """Return entries of each row, [B, C], at i32[B, K]; `nothing` if out of range."""
    inside = (index >= 0) & (index < rows.shape[1])
    if rows.shape[1] == 0:
        return jnp.full(index.shape, nothing, rows.dtype)
    taken = jnp.take_along_axis(rows, jnp.clip(index, 0, rows.shape[1] - 1), axis=1)
    return jnp.where(inside, taken, jnp.asarray(nothing, rows.dtype))
