"""Insertion of restored blocks into the prefix index.

Columns are inserted in order of their chains, parents first: the parent is verified as
in `commit`, and a free, uncached block is allocated. Then all free blocks of the chains
become the most recently used, children before parents.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import allocator
from jkv.metadata.ring import Keep
from jkv.operations import fori_loop
from jkv.prefixes import hash_tables, hashing, prefix_index
from jkv.prefixes.hash_tables import Prefixes
from jkv.state import Metadata
from jkv.tiers.choosing import find_free


class Lanes(NamedTuple):
    """W columns of sequences to insert, parents before children."""

    tokens: Any  # i32[W, T]
    salts: Any  # i32[W], cache salts
    columns: Any  # i32[W], position of each in its sequence
    parents: Any  # i32[W], lanes of the parents; -1: see `above`
    above: Any  # i32[W], the parent's block in the leading group; N_0: none
    is_first: Any  # bool[W], True without a parent
    valid: Any  # bool[W], False for padding
    # Per group with blocks, bool[W], True if the host has the block's contents.
    held: tuple[Any, ...]


class Entered(NamedTuple):
    """Blocks of the columns after insertion."""

    stands: jax.Array  # i32[W], in the leading group; N_0 if missing
    # Per group, i32[W], the block to write; N for none.
    written: tuple[jax.Array, ...]


class _Carry(NamedTuple):
    metadata: Metadata
    entered: Entered
    num_used: tuple[jax.Array, ...]  # per group, i32[1], number of blanks allocated


def _enter(metadata: Metadata, lanes: Lanes) -> tuple[Metadata, Entered]:
    """Insert columns into the index, as far as free, uncached blocks suffice."""
    width = lanes.tokens.shape[0]
    numbers, groups = metadata.block_numbers, metadata.block_groups
    blanks = tuple(
        find_free(metadata, number, jnp.int32(width), width=width, known=False)
        for number in numbers
    )
    none = [jnp.full((width,), g.num_blocks, jnp.int32) for g in groups]
    start = _Carry(
        metadata,
        Entered(none[numbers.index(metadata.leader)], tuple(none)),
        tuple(jnp.zeros((1,), jnp.int32) for _ in groups),
    )
    trips = jnp.sum(lanes.valid, dtype=jnp.int32)
    carry = fori_loop(
        jnp.int32(0),
        trips,
        lambda i, carry: _enter_one(carry, lanes, blanks, i[None]),
        start,
    )
    metadata = carry.metadata
    for number, block in zip(numbers, carry.entered.written, strict=True):
        metadata = allocator.lower(metadata, number, block)
    return metadata, carry.entered


def _enter_one(
    carry: _Carry, lanes: Lanes, blanks: tuple[jax.Array, ...], lane: jax.Array
) -> _Carry:
    """Insert one column, i32[1], with its blocks in the other groups."""
    metadata, entered, num_used = carry
    numbers, nothing = metadata.block_numbers, metadata.leading.num_blocks
    leader = numbers.index(metadata.leader)
    tokens, salts, columns, parents, above, is_first = (
        jnp.asarray(each)[lane] for each in lanes[:6]
    )
    before = entered.stands.at[parents].get(mode="clip")
    before = jnp.where(parents < 0, above, before)
    has_parent = is_first | (before < nothing)

    index = prefix_index.index_of(metadata)
    hash_above = index.hashes.at[before].get(mode="clip")
    hash_above = jnp.where(is_first, hashing.salt_hash(salts), hash_above)
    hashes = hash_above + hashing.column_hash(tokens, columns)
    prefixes = Prefixes(tokens, salts, hashes, None, before)

    own = blanks[leader].at[num_used[leader]].get(mode="fill", fill_value=nothing)
    may_enter = has_parent & jnp.asarray(lanes.held[leader])[lane] & (own < nothing)
    # Block 0 is a placeholder for a column that is only looked up.
    block = jnp.where(has_parent, jnp.where(may_enter, own, 0), nothing)
    resolved = hash_tables.resolve(metadata, block, prefixes, hash_above, may_enter)
    index = hash_tables.enter(index, resolved, prefixes, before, hash_above)
    metadata = prefix_index.put_index(metadata, index)
    recorded = (
        prefix_index.tokens_of(metadata).at[resolved.enters].set(tokens, mode="drop")
    )
    metadata = metadata.changed(metadata.leader, tokens=recorded)
    written, used = list(entered.written), list(num_used)
    written[leader] = written[leader].at[lane].set(resolved.enters)
    used[leader] += (resolved.enters < nothing).astype(jnp.int32)
    for number in metadata.followers:
        at = numbers.index(number)
        none, is_held = metadata.groups[number].num_blocks, jnp.asarray(lanes.held[at])
        own = blanks[at].at[used[at]].get(mode="fill", fill_value=none)
        metadata, partner = _pair(metadata, number, resolved, own, is_held[lane])
        written[at] = written[at].at[lane].set(partner)
        used[at] += (partner < none).astype(jnp.int32)
    stands = entered.stands.at[lane].set(resolved.stands)
    return _Carry(metadata, Entered(stands, tuple(written)), tuple(used))


def _pair(
    metadata: Metadata,
    number: int,
    resolved: hash_tables.Resolved,
    own: jax.Array,
    is_held: jax.Array,
) -> tuple[Metadata, jax.Array]:
    """Pair a held block of a group with a column's; return it, or N."""
    nothing, no_leader = metadata.groups[number].num_blocks, metadata.leading.num_blocks
    metadata = prefix_index.forget_partners(metadata, number, resolved.enters)
    known = prefix_index.find_partners(metadata, number, resolved.stands)
    is_given = is_held & (own < nothing)
    is_given &= (resolved.stands < no_leader) & (known == nothing)
    leader = jnp.where(is_given, resolved.stands, no_leader)
    own = jnp.where(is_given, own, nothing)
    return prefix_index.set_partners(metadata, number, leader, own), own


def _renew(metadata: Metadata, blocks: jax.Array, keep: Keep | None) -> Metadata:
    """Make blocks of the leading group and their partners the most recently used.

    `blocks`, i32[W], are distinct and in eviction order, N_0 for none; `keep`, [W],
    raises their class and expiry. Referenced blocks are not moved.
    """
    for number in metadata.block_numbers:
        own = prefix_index.find_partners(metadata, number, blocks)
        metadata = allocator.renew(metadata, number, own, keep)
    return metadata


enter, renew = jax.jit(_enter), jax.jit(_renew)
enter_donated = functools.partial(jax.jit, donate_argnums=0)(_enter)
renew_donated = functools.partial(jax.jit, donate_argnums=0)(_renew)
