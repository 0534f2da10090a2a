"""The prefix index after blocks are renumbered or the pool is resized."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jkv.metadata import allocator
from jkv.operations import MOST_COMPARED, fori_loop, gather, scatter, while_loop
from jkv.prefixes import hash_tables
from jkv.prefixes.arrays import IndexArrays, PairedBlocks
from jkv.prefixes.hash_tables import Prefixes, hash_above
from jkv.prefixes.prefix_index import (
    index_of,
    pairs_of,
    put_index,
    tokens_of,
    with_follower,
    with_index,
)
from jkv.state import Metadata

Carry = TypeVar("Carry")
Renamed = Callable[[jax.Array], jax.Array]
Moved = Callable[[jax.Array, int], jax.Array]


def rename_blocks(
    metadata: Metadata, number: int, renamed: Renamed, moved: Moved
) -> Metadata:
    """Renumber the blocks of a group in the index (`Index.rename`)."""
    if number == metadata.leader:
        return _rename_leaders(metadata, renamed, moved)
    beside, no_leader = pairs_of(metadata, number), metadata.leading.num_blocks
    return with_follower(
        metadata,
        number,
        partners=renamed(beside.partners),
        beside=moved(beside.beside, no_leader),
    )


def _rename_leaders(metadata: Metadata, renamed: Renamed, moved: Moved) -> Metadata:
    """Renumber the blocks of the leading group, also in the other groups' pairs."""
    index = index_of(metadata)
    num_old = index.hashes.shape[0]
    index = dataclasses.replace(
        index,
        # Rows depend on hashes, not on ids: entries are renamed in place.
        table=renamed(index.table),
        hashes=moved(index.hashes, 0),
        parents=renamed(moved(index.parents, num_old)),
        salts=moved(index.salts, 0),
        followers=tuple(
            PairedBlocks(
                partners=moved(beside.partners, beside.beside.shape[0]),
                beside=renamed(beside.beside),
            )
            for beside in index.followers
        ),
    )
    if index.wide_hashes is not None and index.hashes_above is not None:
        index = dataclasses.replace(
            index,
            wide_hashes=moved(index.wide_hashes, 0),
            hashes_above=moved(index.hashes_above, 0),
        )
    return put_index(metadata, index)


def reenter(metadata: Metadata) -> Metadata:
    """Index the blocks again, in a hash table for their number.

    A block whose new row is full leaves the index, with all its descendants.
    """
    before = index_of(metadata)
    was_indexed = before.hashes != 0
    metadata, hashes = _enter_anew(metadata)
    metadata = with_index(
        metadata,
        hashes=hashes,
        rows=index_of(metadata).with_committed(_still_committed(metadata, hashes)).rows,
    )

    group = metadata.leading
    lost = was_indexed & (hashes == 0) & (group.reference_counts == 0)
    num_lost = jnp.sum(lost, dtype=jnp.int32)
    return allocator.count_forgotten(metadata, metadata.leader, num_lost)


def _enter_anew(metadata: Metadata) -> tuple[Metadata, jax.Array]:
    """Fill empty tables; return the hashes of blocks that stay, u32[N], or 0."""
    before, num_blocks = index_of(metadata), metadata.leading.num_blocks
    shape = 2 * num_blocks, before.table.shape[1]
    table = jnp.full(shape, num_blocks, jnp.int32)
    empty = dataclasses.replace(before, table=table)
    tokens, wide = tokens_of(metadata), before.wide_hashes

    def enter_some(
        carry: tuple[IndexArrays, jax.Array], block: jax.Array
    ) -> tuple[IndexArrays, jax.Array]:
        index, stays = carry
        prefixes = Prefixes(
            tokens=gather(tokens, block),
            salts=gather(before.salts, block),
            hashes=gather(before.hashes, block, fill=0),
            wide=None if wide is None else gather(wide, block),
        )
        parents = gather(before.parents, block)
        above = hash_above(before, block)
        now = put_index(metadata, index)
        may_enter = prefixes.hashes != 0
        resolved = hash_tables.resolve(now, block, prefixes, above, may_enter)
        index = hash_tables.enter(index, resolved, prefixes, parents, above)
        return index, scatter(stays, resolved.enters, True)

    start = empty, jnp.zeros((num_blocks,), bool)
    index, stays = _for_all_blocks(num_blocks, enter_some, start)

    def is_cut_off(hashes: jax.Array) -> jax.Array:
        parent = gather(hashes, before.parents, fill=1)
        return (hashes != 0) & (parent == 0)

    # Rarely any trips: a row has 12 entries for one block on average.
    hashes = while_loop(
        lambda hashes: jnp.any(is_cut_off(hashes)),
        lambda hashes: jnp.where(is_cut_off(hashes), jnp.uint32(0), hashes),
        jnp.where(stays, before.hashes, jnp.uint32(0)),
    )
    return put_index(metadata, index), hashes


def _for_all_blocks(
    num_blocks: int, body: Callable[[Carry, jax.Array], Carry], carry: Carry
) -> Carry:
    """Run `body(carry, block)` over all blocks in chunks, i32[P], padded with N."""
    lane = jnp.arange(MOST_COMPARED, dtype=jnp.int32)
    return fori_loop(
        jnp.int32(0),
        jnp.int32(-(-num_blocks // MOST_COMPARED)),
        lambda i, carry: body(carry, jnp.minimum(i * MOST_COMPARED + lane, num_blocks)),
        carry,
    )


def _still_committed(metadata: Metadata, hashes: jax.Array) -> jax.Array:
    """Return the committed tokens before the first unindexed block, i32[S]."""
    group, committed = metadata.leading, index_of(metadata).committed
    size, num_columns = jnp.int32(group.block_size), group.max_blocks_per_sequence
    visible = gather(hashes, group.block_tables, fill=0) != 0
    visible |= group.window.gone_cells(num_columns, group.block_size)
    leading = jnp.cumprod(visible, axis=1, dtype=jnp.int32)
    num_visible = jnp.sum(leading, axis=1, dtype=jnp.int32)
    return jnp.where(num_visible < committed // size, num_visible * size, committed)
