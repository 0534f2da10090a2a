"""Making blocks cached again that come from the host.

Each block is entered where its parent is, in order of the chains: the parent is proved
as `commit` proves it, and the block goes into a free block that holds nothing. Then all
blocks of the chains that are free are made the last to be handed out, children first.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import allocator
from jkv.metadata.ring import Keep
from jkv.prefixes import hash_tables, hashing, prefix_index
from jkv.prefixes.hash_tables import Prefixes
from jkv.sharding.loops import fori_loop
from jkv.state import Metadata
from jkv.tiers.choosing import find_free


class Lanes(NamedTuple):
    """W columns of texts that are to stand in the cache, parents before children."""

    tokens: Any  # i32[W, T]
    salts: Any  # i32[W], domains
    columns: Any  # i32[W], of each in its text
    parents: Any  # i32[W], lanes of the columns before; -1: `above` names the block
    above: Any  # i32[W], the leading group's block before; N_0: there is none
    is_first: Any  # bool[W], whether no column is before it
    valid: Any  # bool[W], False behind the last
    # Of each group with blocks bool[W], whether the host has what its block shall hold.
    held: tuple[Any, ...]


class Entered(NamedTuple):
    """Where the columns stand now."""

    stands: jax.Array  # i32[W], in the leading group; N_0 for those that do not
    # Of each group i32[W], the block that is to be written; N for none.
    written: tuple[jax.Array, ...]


class _Carry(NamedTuple):
    metadata: Metadata
    entered: Entered
    num_used: tuple[jax.Array, ...]  # i32[1] of each group, blocks taken so far


def _enter(metadata: Metadata, lanes: Lanes) -> tuple[Metadata, Entered]:
    """Enter columns in the index, as far as blocks that hold nothing are free."""
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
    """Enter one column, i32[1], and what other groups have beside it."""
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
    # One that may not enter is only looked for, whatever its number is.
    block = jnp.where(has_parent, jnp.where(may_enter, own, 0), nothing)
    resolved = hash_tables.resolve(metadata, block, prefixes, may_enter)
    index = hash_tables.enter(index, resolved, prefixes, before, hash_above)
    index = hash_tables.insert_children(index, resolved.enters, hash_above)
    metadata = prefix_index.put_index(metadata, index)
    told = prefix_index.tokens_of(metadata).at[resolved.enters].set(tokens, mode="drop")
    metadata = metadata.changed(metadata.leader, tokens=told)
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
    """Give a group a block beside a column's, if it is held; return it, N for none."""
    nothing, no_leader = metadata.groups[number].num_blocks, metadata.leading.num_blocks
    metadata = prefix_index.forget_partners(metadata, number, resolved.enters)
    known = prefix_index.find_partners(metadata, number, resolved.stands)
    is_given = is_held & (own < nothing)
    is_given &= (resolved.stands < no_leader) & (known == nothing)
    leader = jnp.where(is_given, resolved.stands, no_leader)
    own = jnp.where(is_given, own, nothing)
    return prefix_index.set_partners(metadata, number, leader, own), own


def _renew(metadata: Metadata, blocks: jax.Array, keep: Keep | None) -> Metadata:
    """Make blocks of the leading group and those beside them the last to be handed out.

    They are i32[W], all different, in the order in which they shall go, N_0 for none,
    and kept at least by class and time, [W]. What is not free stays where it is.
    """
    for number in metadata.block_numbers:
        own = prefix_index.find_partners(metadata, number, blocks)
        metadata = allocator.renew(metadata, number, own, keep)
    return metadata


enter, renew = jax.jit(_enter), jax.jit(_renew)
enter_donated = functools.partial(jax.jit, donate_argnums=0)(_enter)
renew_donated = functools.partial(jax.jit, donate_argnums=0)(_renew)
