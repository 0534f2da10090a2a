"""New ids for blocks, wherever one is named or described."""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.metadata import allocator, counters, ring
from jkv.metadata.xla_cpu import running_sum
from jkv.state import Metadata, Ring
from jkv.status import Counter


@jax.jit
def in_order(metadata: Metadata) -> tuple[jax.Array, jax.Array]:
    """Return the blocks in the order that `compact` gives them, i32[N], and i32[].

    Live blocks come by their first mention in the tables, then the free ones from the
    head of the ring on. The second result is the number of live ones.
    """
    num_blocks = metadata.num_blocks
    entries = metadata.block_tables.reshape(-1)
    place = jnp.arange(entries.shape[0], dtype=jnp.int32)
    first = jnp.full((num_blocks,), entries.shape[0], jnp.int32)
    first = first.at[entries].min(place, mode="drop")
    is_first = first.at[entries].get(mode="fill", fill_value=-1) == place
    blocks = jnp.zeros((num_blocks,), jnp.int32)
    blocks, num_live = _extend(blocks, jnp.int32(0), entries, is_first)

    free = metadata.free_blocks
    place = jnp.arange(free.ids.shape[0], dtype=jnp.int32)
    if metadata.prefix is None:
        ids, is_free = ring.peek(free, place), place < free.span
    else:
        ids, is_free = allocator.entries(free, metadata.prefix, place)
    return _extend(blocks, num_live, ids, is_free)[0], num_live


def _extend(
    blocks: jax.Array, count: jax.Array, ids: jax.Array, chosen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Put the chosen ids, in order, behind the first `count` of the blocks."""
    ranks = count + running_sum(chosen.astype(jnp.int32))
    index = jnp.where(chosen, ranks - 1, blocks.shape[0])
    return blocks.at[index].set(ids, mode="drop"), ranks[-1]


def renumber(
    metadata: Metadata, source: jax.Array, free_ids: jax.Array, bounds: jax.Array
) -> Metadata:
    """Give the blocks new ids, wherever one is named or described.

    Args:
      metadata: the state of N blocks.
      source: i32[N'], old id of each block, all different; N or above for a new one.
      free_ids: i32[N'], new ids in ring order, then N'.
      bounds: i32[4], of the new ring.
    """
    num_old, num_new = metadata.num_blocks, source.shape[0]
    place = jnp.arange(num_new, dtype=jnp.int32)
    target = jnp.full((num_old,), num_new, jnp.int32)
    target = target.at[source].set(place, mode="drop", unique_indices=True)

    def renamed(ids: jax.Array) -> jax.Array:
        return target.at[ids].get(mode="fill", fill_value=num_new)

    def moved(rows: jax.Array, fill: int) -> jax.Array:
        return rows.at[source].get(mode="fill", fill_value=fill)

    prefix, room = metadata.prefix, num_new
    if prefix is not None:
        room *= 2
        positions = jnp.full((num_new,), -1, jnp.int32)
        positions = positions.at[free_ids].set(place, mode="drop")
        prefix = dataclasses.replace(
            prefix,
            # Rows follow from hashes, not from ids: what they name is renamed in place.
            buckets=renamed(prefix.buckets),
            children=renamed(prefix.children),
            hashes=moved(prefix.hashes, 0),
            parents=renamed(moved(prefix.parents, num_old)),
            salts=moved(prefix.salts, 0),
            positions=positions,
        )
    tokens = metadata.tokens
    return dataclasses.replace(
        metadata,
        block_tables=renamed(metadata.block_tables),
        reference_counts=moved(metadata.reference_counts, 0),
        free_blocks=Ring(
            ids=jnp.pad(free_ids, (0, room - num_new), constant_values=num_new),
            bounds=bounds,
        ),
        tokens=None if tokens is None else moved(tokens, -1),
        prefix=prefix,
    )


def count_compaction(metadata: Metadata, compacts: jax.Array) -> Metadata:
    """Count a compaction, if it is one, and note the clock."""
    metadata = counters.add(metadata, {Counter.COMPACTIONS: compacts})
    rows = metadata.counters
    last = jnp.where(compacts, rows[Counter.CLOCK], rows[Counter.LAST_COMPACTION])
    rows = rows.at[int(Counter.LAST_COMPACTION)].set(last)
    return dataclasses.replace(metadata, counters=rows)
