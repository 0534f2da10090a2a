"""The hash table of the prefix index: blocks by prefix, and by parent.

Its first N rows, the buckets, list blocks by their hash; the others list them by their
parent's hash, for partial matches. A row has 12 entries. Entries are never removed:
readers compare them with the arrays by block, and new entries overwrite stale ones.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.counts import ROW_SIZE
from jkv.operations import find_equals, gather, scatter
from jkv.prefixes import hashing
from jkv.prefixes.arrays import IndexArrays
from jkv.prefixes.prefix_index import index_of, tokens_of
from jkv.state import Metadata


class Prefixes(NamedTuple):
    """Keys of full blocks in the index."""

    tokens: jax.Array  # i32[..., T], tokens of the block
    salts: jax.Array  # i32[...], cache salt
    hashes: jax.Array  # u32[...], of the prefix up to the block's end
    wide: jax.Array | None  # u32[..., 2], more hashes, if parents may be released
    # i32[...], the preceding block, N for none; None if not compared.
    parents: jax.Array | None = None


class Resolved(NamedTuple):
    """Outcome of the look-up of P blocks."""

    stands: jax.Array  # i32[P], the indexed equal block, N for none
    enters: jax.Array  # i32[P], the block itself if it enters, else N
    row: jax.Array  # i32[2, P], its rows in the table: by prefix, by parent
    column: jax.Array  # i32[2, P]


def resolve(
    metadata: Metadata,
    block: jax.Array,
    prefixes: Prefixes,
    hashes_above: jax.Array,
    may_enter: jax.Array,
) -> Resolved:
    """Find each block's equal in the index, or entries for the block itself.

    Blocks are i32[P], N for none, and distinct where they may enter, bool[P]. Of
    several equal blocks in a call the first that may enter does, and the later ones
    resolve to it. A block does not enter if its bucket is full or its hash belongs to
    other tokens. A full row of children overwrites one of its entries: a child without
    an entry is not found as a partial match.
    """
    index, nothing = index_of(metadata), metadata.leading.num_blocks
    equal = look_up(index, prefixes.hashes)
    is_equal = (block < nothing) & is_same(metadata, equal, prefixes)
    # `~is_equal` is implied, but makes the writes depend on all reads: otherwise XLA
    # would copy the arrays.
    wants = may_enter & (block < nothing) & (equal == nothing) & ~is_equal
    wants &= prefixes.hashes != 0
    first = find_equals(prefixes.hashes, wants).first
    lane = jnp.arange(block.shape[0], dtype=jnp.int32)

    rows = jnp.stack(
        [row_of(index, prefixes.hashes), child_row_of(index, hashes_above)]
    )
    claims = jnp.tile(wants & (first == lane), 2)
    column = _find_entries(_find_free(index, rows, block), rows.reshape(-1), claims)
    column = column.reshape(2, -1)
    enters = jnp.where(column[0] < ROW_SIZE, block, nothing)
    theirs = jax.tree.map(lambda each: gather(each, first), prefixes)
    follows = (block < nothing) & (first < lane) & _agree(theirs, prefixes)
    new = gather(enters, jnp.where(follows, first, lane))
    return Resolved(jnp.where(is_equal, equal, new), enters, rows, column)


def enter(
    index: IndexArrays,
    resolved: Resolved,
    prefixes: Prefixes,
    parents: jax.Array,
    hashes_above: jax.Array,
) -> IndexArrays:
    """Index blocks without an equal, with their keys, [P], and parents."""
    block = resolved.enters
    row = jnp.where(block < index.num_blocks, resolved.row, index.table.shape[0])
    listed = jnp.broadcast_to(block, row.shape)
    index = dataclasses.replace(
        index,
        table=scatter(index.table, (row, resolved.column), listed),
        hashes=scatter(index.hashes, block, prefixes.hashes),
        salts=scatter(index.salts, block, prefixes.salts),
    )
    wide = prefixes.wide
    if index.wide_hashes is None or index.hashes_above is None or wide is None:
        known = scatter(index.parents, block, parents)
        return dataclasses.replace(index, parents=known)
    return dataclasses.replace(
        index,
        wide_hashes=scatter(index.wide_hashes, block, wide),
        hashes_above=scatter(index.hashes_above, block, hashes_above),
    )


def look_up(index: IndexArrays, hashes: jax.Array) -> jax.Array:
    """Return the indexed block with each hash, i32[...], N for none."""
    bucket = gather(index.table, row_of(index, hashes))
    theirs = gather(index.hashes, bucket, fill=0)
    # 0 marks unindexed blocks; a prefix with that hash is never found.
    hit = (theirs == hashes[..., None]) & (hashes != 0)[..., None]
    nothing = index.hashes.shape[0]
    return jnp.min(jnp.where(hit, bucket, nothing), axis=-1)


def is_same(metadata: Metadata, block: jax.Array, prefixes: Prefixes) -> jax.Array:
    """Return True where indexed blocks, i32[...], match the prefixes, bool[...]."""
    index = index_of(metadata)

    def get(array: jax.Array) -> jax.Array:
        return gather(array, block)

    theirs = Prefixes(
        tokens=get(tokens_of(metadata)),
        salts=get(index.salts),
        hashes=prefixes.hashes,
        wide=None if index.wide_hashes is None else get(index.wide_hashes),
        parents=None if prefixes.parents is None else get(index.parents),
    )
    return (block < metadata.leading.num_blocks) & _agree(theirs, prefixes)


def _agree(theirs: Prefixes, prefixes: Prefixes) -> jax.Array:
    """Return True where keys other than hashes are equal, bool[...]."""
    same = jnp.all(theirs.tokens == prefixes.tokens, axis=-1)
    same &= theirs.salts == prefixes.salts
    if prefixes.parents is not None:
        same &= theirs.parents == prefixes.parents
    if prefixes.wide is None or theirs.wide is None:
        return same
    return same & jnp.all(theirs.wide == prefixes.wide, axis=-1)


def hash_above(index: IndexArrays, block: jax.Array) -> jax.Array:
    """Return the hash of the prefix before blocks, u32[...], or of the salt alone."""
    if index.hashes_above is not None:
        return gather(index.hashes_above, block)
    parent = gather(index.parents, block)
    above = gather(index.hashes, parent, fill=0)
    root = hashing.salt_hash(gather(index.salts, block))
    return jnp.where(parent < index.hashes.shape[0], above, root)


def _find_entries(free: jax.Array, row: jax.Array, claims: jax.Array) -> jax.Array:
    """Assign a free entry of its row, i32[P], to each claiming lane, bool[P].

    `free` is a bit mask of a row's entries, i32[P]. Lanes of one row get its entries in
    turn; `ROW_SIZE`, past the row's end, if there are no more.
    """
    rank, free = find_equals(row, claims).rank[:, None], free[:, None]
    entry = np.arange(ROW_SIZE, dtype=np.int32)[None]
    free_before = jax.lax.population_count(free & ((1 << entry) - 1))
    is_free = (free >> entry) & 1 == 1
    is_mine = is_free & (free_before == rank) & claims[:, None]
    return jnp.min(jnp.where(is_mine, entry, ROW_SIZE), axis=1)


def _find_free(index: IndexArrays, rows: jax.Array, block: jax.Array) -> jax.Array:
    """Return the free entries of the rows of blocks, i32[2, P], as bit masks, i32[2P].

    The first half are buckets. A full row of children has a free entry nevertheless.
    """
    listed = gather(index.table, rows)
    hashes = gather(index.hashes, listed, fill=0)
    keys = jnp.stack(
        [
            row_of(index, hashes[0]),
            child_row_of(index, hash_above(index, listed[1])),
        ]
    )
    is_stale = (hashes == 0) | (keys != rows[..., None])
    # A repetition of an earlier entry in the row is free, too.
    earlier = np.tri(ROW_SIZE, k=-1, dtype=bool)[None, None]
    is_repeated = jnp.any((listed[..., None] == listed[..., None, :]) & earlier, axis=3)
    bits = np.left_shift(1, np.arange(ROW_SIZE), dtype=np.int32)[None, None]
    free = jnp.where(is_stale | is_repeated, bits, 0)
    buckets, children = jnp.sum(free, axis=2, dtype=jnp.int32)
    children = jnp.where(children == 0, 1 << (block % ROW_SIZE), children)
    return jnp.concatenate([buckets, children])


def row_of(index: IndexArrays, hashes: jax.Array) -> jax.Array:
    """Return the bucket of each hash, i32[...]."""
    return _spread(hashes, index.num_blocks)


def child_row_of(index: IndexArrays, hashes_above: jax.Array) -> jax.Array:
    """Return the row of the children of a prefix, i32[...]."""
    return index.num_blocks + _spread(~hashes_above, index.num_blocks)


def _spread(hashes: jax.Array, num_rows: int) -> jax.Array:
    """Return a row below `num_rows` for each hash, i32[...]."""
    return (hashing.mixed(hashes) % np.uint32(num_rows)).astype(jnp.int32)
