"""The hash tables of the prefix index: blocks by their prefix, and by their parent.

A row has 8 places for blocks with the same hash of the row, 16 for children. What a
place names need not be indexed any more, so entries are never removed: whoever reads
them compares with the arrays by block, and whoever needs a place takes a stale one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata import mentions
from jkv.metadata.prefixes import hashing
from jkv.metadata.prefixes.prefix_index import index_of, tokens_of
from jkv.sharding.loops import while_loop
from jkv.state import Metadata, PrefixIndex


def insert(
    metadata: Metadata,
    block: jax.Array,
    hashes: jax.Array,
    tokens: jax.Array,
    salts: jax.Array,
    may_enter: jax.Array,
    wide: jax.Array | None = None,
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
      wide: u32[P, 2], more hashes of the prefixes, with a window.

    Returns:
      The metadata, and i32[P]: the block that stands for each, N where none does.
    """
    nothing = metadata.num_blocks
    lane = jnp.arange(block.shape[0], dtype=jnp.int32)
    row = row_of(index_of(metadata).buckets, hashes)
    Carry = tuple[PrefixIndex, jax.Array, jax.Array]

    # In each round every block without an answer looks again and claims a free place;
    # the first of those that claim the same place gets it. Rarely more than two rounds.
    def round_(state: Carry) -> Carry:
        prefix, answer, pending = state
        equal = look_up(prefix, hashes)
        now = dataclasses.replace(metadata, prefix=prefix)
        is_equal = is_same(now, equal, tokens, salts, wide)
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
        if wide is not None:
            prefix = _note_wide(prefix, won, wide)
        return prefix, jnp.where(wins, block, answer), pending & ~wins

    prefix, answer, _ = while_loop(
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
    row = row_of(table, ~parent_hash)
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

    children, _ = while_loop(
        lambda state: jnp.any(state[1]),
        round_,
        (table, block < prefix.hashes.shape[0]),
    )
    return dataclasses.replace(prefix, children=children)


def look_up(prefix: PrefixIndex, hashes: jax.Array) -> jax.Array:
    """Return the indexed block with each hash, i32[...], N where there is none."""
    bucket = prefix.buckets[row_of(prefix.buckets, hashes)]
    theirs = prefix.hashes.at[bucket].get(mode="fill", fill_value=0)
    # 0 marks what is not indexed; a prefix with that hash is never found.
    hit = (theirs == hashes[..., None]) & (hashes != 0)[..., None]
    nothing = prefix.hashes.shape[0]
    return jnp.min(jnp.where(hit, bucket, nothing), axis=-1)


def is_same(
    metadata: Metadata,
    block: jax.Array,
    tokens: jax.Array,
    salts: jax.Array,
    wide: jax.Array | None = None,
) -> jax.Array:
    """Return whether indexed blocks, [...], have these tokens, [..., T], and salts.

    With a window also whether what came before is the same, by u32[..., 2].
    """
    same = jnp.all(
        tokens_of(metadata).at[block].get(mode="clip") == tokens, axis=block.ndim
    )
    theirs = index_of(metadata).salts.at[block].get(mode="clip")
    same &= (block < metadata.num_blocks) & (theirs == salts)
    if wide is None:
        return same
    before = index_of(metadata).wide_hashes
    assert before is not None
    return same & jnp.all(before.at[block].get(mode="clip") == wide, axis=-1)


def _note_wide(prefix: PrefixIndex, block: jax.Array, wide: jax.Array) -> PrefixIndex:
    """Note the wide hashes, u32[P, 2], of blocks, i32[P]; N is dropped."""
    assert prefix.wide_hashes is not None
    hashes = prefix.wide_hashes.at[block].set(wide, mode="drop")
    return dataclasses.replace(prefix, wide_hashes=hashes)


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
    num_lanes, (num_rows, width) = block.shape[0], table.shape
    row = jnp.where(claims, row, num_rows)
    if num_lanes <= mentions.MOST_COMPARED:
        place = row * width + column
        wins = claims & mentions.is_first(place, table.size)
    else:
        # The places themselves tell who is first; nobody else needs them meanwhile.
        lane = jnp.arange(num_lanes, dtype=jnp.int32)
        table = table.at[row, column].set(num_lanes, mode="drop")
        table = table.at[row, column].min(lane, mode="drop")
        wins = claims & (table.at[row, column].get(mode="fill", fill_value=-1) == lane)
    row = jnp.where(wins, row, num_rows)
    return table.at[row, column].set(block, mode="drop"), wins


def _is_free_place(prefix: PrefixIndex, bucket: jax.Array, row: jax.Array) -> jax.Array:
    """Return which places of buckets, i32[P, W], name nothing that is indexed there."""
    hashes = prefix.hashes.at[bucket].get(mode="fill", fill_value=0)
    is_stale = (hashes == 0) | (row_of(prefix.buckets, hashes) != row[:, None])
    return is_stale | _is_repeated(bucket)


def _is_free_child(prefix: PrefixIndex, listed: jax.Array, row: jax.Array) -> jax.Array:
    """Return which places, i32[P, W], name nothing that is a child listed there."""
    hashes = prefix.hashes.at[listed].get(mode="fill", fill_value=0)
    parent = prefix.parents.at[listed].get(mode="clip")
    root = hashing.salt_hash(prefix.salts.at[listed].get(mode="clip"))
    above = prefix.hashes.at[parent].get(mode="fill", fill_value=0)
    above = jnp.where(parent < prefix.hashes.shape[0], above, root)
    if prefix.hashes_above is not None:
        above = prefix.hashes_above.at[listed].get(mode="clip")
    is_stale = (hashes == 0) | (row_of(prefix.children, ~above) != row[:, None])
    return is_stale | _is_repeated(listed)


def _is_repeated(ids: jax.Array) -> jax.Array:
    """Return which ids of each row, i32[P, W], stand further left in it, too."""
    earlier = np.tri(ids.shape[1], k=-1, dtype=bool)[None]
    return jnp.any((ids[:, :, None] == ids[:, None, :]) & earlier, axis=2)


def row_of(table: jax.Array, hashes: jax.Array) -> jax.Array:
    """Return the row of a hash table for each hash, i32[...]."""
    return (hashing.mixed(hashes) % np.uint32(table.shape[0])).astype(jnp.int32)
