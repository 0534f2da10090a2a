"""The prefix index of a pool whose blocks have new ids, or of another size."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jkv.metadata import counters, gaps
from jkv.metadata.prefixes import hash_tables, hashing
from jkv.metadata.prefixes.prefix_index import if_indexed, index_of, tokens_of
from jkv.sharding.loops import while_loop
from jkv.state import Metadata, PrefixIndex
from jkv.status import Counter


@if_indexed
def rename_blocks(
    metadata: Metadata,
    renamed: Callable[[jax.Array], jax.Array],
    moved: Callable[[jax.Array, int], jax.Array],
    free_ids: jax.Array,
) -> Metadata:
    """Give the blocks of the index new ids.

    Args:
      metadata: the state, everything else renumbered.
      renamed: new ids of old ones, N' where there is none.
      moved: values of the new blocks from those of the old, with a fill for new ones.
      free_ids: i32[N'], new ids in ring order, then N'.
    """
    prefix = index_of(metadata)
    num_old, num_new = prefix.hashes.shape[0], free_ids.shape[0]
    place = jnp.arange(num_new, dtype=jnp.int32)
    positions = jnp.full((num_new,), -1, jnp.int32)
    prefix = dataclasses.replace(
        prefix,
        # Rows follow from hashes, not from ids: what they name is renamed in place.
        buckets=renamed(prefix.buckets),
        children=renamed(prefix.children),
        hashes=moved(prefix.hashes, 0),
        parents=renamed(moved(prefix.parents, num_old)),
        salts=moved(prefix.salts, 0),
        positions=positions.at[free_ids].set(place, mode="drop"),
    )
    if prefix.wide_hashes is not None and prefix.hashes_above is not None:
        prefix = dataclasses.replace(
            prefix,
            wide_hashes=moved(prefix.wide_hashes, 0),
            hashes_above=moved(prefix.hashes_above, 0),
        )
    return dataclasses.replace(metadata, prefix=prefix)


@if_indexed
def reenter(metadata: Metadata) -> Metadata:
    """Enter the indexed blocks in hash tables of as many rows as there are blocks.

    The row of an entry follows from hashes and from the number of rows, so a pool of
    another size needs other tables. A block whose new row is full leaves the index, and
    so does what was built on it.
    """
    before, num_blocks = index_of(metadata), metadata.num_blocks
    was_indexed = before.hashes != 0
    metadata, hashes = _enter_anew(metadata)
    prefix = dataclasses.replace(
        index_of(metadata),
        hashes=hashes,
        committed=_still_committed(metadata, hashes),
    )

    # Only what was listed: a parent may have more children than a row has places.
    listed = jnp.zeros((num_blocks,), bool).at[before.children].set(True, mode="drop")
    place = jnp.arange(num_blocks, dtype=jnp.int32)
    listed = jnp.where(listed & (hashes != 0), place, num_blocks)
    prefix = hash_tables.insert_children(prefix, listed, _hash_above(before, hashes))
    lost = was_indexed & (hashes == 0) & (metadata.reference_counts == 0)
    num_lost = jnp.sum(lost, dtype=jnp.int32)
    metadata = dataclasses.replace(metadata, prefix=prefix)
    return counters.add(metadata, {Counter.BLOCKS_EVICTED: num_lost})


def _enter_anew(metadata: Metadata) -> tuple[Metadata, jax.Array]:
    """Fill empty hash tables with the indexed blocks.

    Returns:
      The metadata with the tables, no child listed, and u32[N], the hash of each block
      that stays in the index, 0 for the others.
    """
    before, num_blocks = index_of(metadata), metadata.num_blocks
    place = jnp.arange(num_blocks, dtype=jnp.int32)
    is_indexed = before.hashes != 0
    empty = dataclasses.replace(
        before,
        buckets=_emptied(before.buckets, num_blocks),
        children=_emptied(before.children, num_blocks),
    )
    metadata, answer = hash_tables.insert(
        dataclasses.replace(metadata, prefix=empty),
        jnp.where(is_indexed, place, num_blocks),
        before.hashes,
        tokens_of(metadata),
        before.salts,
        is_indexed,
        before.wide_hashes,
    )

    def is_cut_off(hashes: jax.Array) -> jax.Array:
        has_parent = before.parents < num_blocks
        return (hashes != 0) & has_parent & (_hash_above(before, hashes) == 0)

    # Hardly ever a trip: a row has eight places for one block on average.
    return metadata, while_loop(
        lambda hashes: jnp.any(is_cut_off(hashes)),
        lambda hashes: jnp.where(is_cut_off(hashes), jnp.uint32(0), hashes),
        jnp.where(answer == place, before.hashes, jnp.uint32(0)),
    )


def _hash_above(prefix: PrefixIndex, hashes: jax.Array) -> jax.Array:
    """Return the hash, of u32[N], that ends where each block begins, u32[N]."""
    if prefix.hashes_above is not None:
        return prefix.hashes_above
    num_blocks = hashes.shape[0]
    parent = hashes.at[prefix.parents].get(mode="fill", fill_value=0)
    root = hashing.salt_hash(prefix.salts)
    return jnp.where(prefix.parents < num_blocks, parent, root)


def _emptied(table: jax.Array, num_rows: int) -> jax.Array:
    """Return a hash table of so many rows, which names nothing, i32[rows, places]."""
    return jnp.full((num_rows, table.shape[1]), num_rows, jnp.int32)


def _still_committed(metadata: Metadata, hashes: jax.Array) -> jax.Array:
    """Return what sequences have committed, i32[S], up to the first block not indexed.

    Args:
      metadata: the state, where `committed` counts as if all blocks still were.
      hashes: u32[N], 0 for blocks that are not indexed.
    """
    size, committed = jnp.int32(metadata.block_size), index_of(metadata).committed
    visible = hashes.at[metadata.block_tables].get(mode="fill", fill_value=0) != 0
    visible |= gaps.find_gone(metadata)
    leading = jnp.cumprod(visible, axis=1, dtype=jnp.int32)
    num_visible = jnp.sum(leading, axis=1, dtype=jnp.int32)
    return jnp.where(num_visible < committed // size, num_visible * size, committed)
