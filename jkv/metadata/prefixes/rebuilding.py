"""The prefix index of a pool of another size."""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.metadata import counters
from jkv.metadata.prefixes import hashing, prefix_index
from jkv.state import Metadata
from jkv.status import Counter


def reenter(metadata: Metadata) -> Metadata:
    """Enter the indexed blocks in hash tables of as many rows as there are blocks.

    The row of an entry follows from hashes and from the number of rows, so a pool of
    another size needs other tables. A block whose new row is full leaves the index, and
    so does what was built on it.
    """
    if metadata.prefix is None:
        return metadata
    before, num_blocks = metadata.prefix, metadata.num_blocks
    place = jnp.arange(num_blocks, dtype=jnp.int32)
    is_indexed = before.hashes != 0
    empty = dataclasses.replace(
        before,
        buckets=_emptied(before.buckets, num_blocks),
        children=_emptied(before.children, num_blocks),
    )
    metadata, answer = prefix_index.insert(
        dataclasses.replace(metadata, prefix=empty),
        jnp.where(is_indexed, place, num_blocks),
        before.hashes,
        prefix_index.tokens_of(metadata),
        before.salts,
        is_indexed,
    )

    def above(hashes: jax.Array) -> jax.Array:
        """Return the hash that ends where each block begins, u32[N]."""
        root = hashing.salt_hash(before.salts)
        parent = hashes.at[before.parents].get(mode="fill", fill_value=0)
        return jnp.where(before.parents < num_blocks, parent, root)

    def is_cut_off(hashes: jax.Array) -> jax.Array:
        has_parent = before.parents < num_blocks
        return (hashes != 0) & has_parent & (above(hashes) == 0)

    # Hardly ever a trip: a row has eight places for one block on average.
    hashes = jax.lax.while_loop(
        lambda hashes: jnp.any(is_cut_off(hashes)),
        lambda hashes: jnp.where(is_cut_off(hashes), jnp.uint32(0), hashes),
        jnp.where(answer == place, before.hashes, jnp.uint32(0)),
    )
    prefix = dataclasses.replace(
        prefix_index.index_of(metadata),
        hashes=hashes,
        committed=_still_committed(metadata, hashes, before.committed),
    )

    # Only what was listed: a parent may have more children than a row has places.
    listed = jnp.zeros((num_blocks,), bool).at[before.children].set(True, mode="drop")
    listed = jnp.where(listed & (hashes != 0), place, num_blocks)
    prefix = prefix_index.insert_children(prefix, listed, above(hashes))
    lost = is_indexed & (hashes == 0) & (metadata.reference_counts == 0)
    metadata = dataclasses.replace(metadata, prefix=prefix)
    num_lost = jnp.sum(lost, dtype=jnp.int32)
    return counters.add(metadata, {Counter.BLOCKS_EVICTED: num_lost})


def _emptied(table: jax.Array, num_rows: int) -> jax.Array:
    """Return a hash table of so many rows, which names nothing, i32[rows, places]."""
    return jnp.full((num_rows, table.shape[1]), num_rows, jnp.int32)


def _still_committed(
    metadata: Metadata, hashes: jax.Array, committed: jax.Array
) -> jax.Array:
    """Return what sequences have committed, i32[S], up to the first block not indexed.

    Args:
      metadata: the state.
      hashes: u32[N], 0 for blocks that are not indexed.
      committed: i32[S], tokens as if all of them still were.
    """
    size = jnp.int32(metadata.block_size)
    visible = hashes.at[metadata.block_tables].get(mode="fill", fill_value=0) != 0
    leading = jnp.cumprod(visible, axis=1, dtype=jnp.int32)
    num_visible = jnp.sum(leading, axis=1, dtype=jnp.int32)
    return jnp.where(num_visible < committed // size, num_visible * size, committed)
