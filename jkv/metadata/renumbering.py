"""New ids for blocks, wherever one is named: what `compact` and `resize` share."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import counters, mentions
from jkv.metadata.prefixes import holes, rebuilding
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
    is_first = mentions.is_first(entries, num_blocks) & (entries < num_blocks)
    blocks = jnp.zeros((num_blocks,), jnp.int32)
    blocks, num_live = _extend(blocks, jnp.int32(0), entries, is_first)
    place = jnp.arange(metadata.free_blocks.ids.shape[0], dtype=jnp.int32)
    ids, is_free = holes.entries(metadata, place)
    return _extend(blocks, num_live, ids, is_free)[0], num_live


def _extend(
    blocks: jax.Array, count: jax.Array, ids: jax.Array, chosen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Put the chosen ids, in order, behind the first `count` of the blocks."""
    ranks = count + running_sum(chosen.astype(jnp.int32))
    index = jnp.where(chosen, ranks - 1, blocks.shape[0])
    return blocks.at[index].set(ids, mode="drop"), ranks[-1]


class FreeBlocks(NamedTuple):
    """The free blocks of a renumbered pool."""

    ids: jax.Array  # i32[N'], new ids in ring order, then N'
    num: jax.Array  # i32[]
    fewest: jax.Array  # i32[], lowest count so far


def renumber(metadata: Metadata, source: jax.Array, free: FreeBlocks) -> Metadata:
    """Give the blocks new ids.

    Args:
      metadata: the state of N blocks.
      source: i32[N'], old id of each block, all different; N or above for a new one.
      free: the free blocks afterwards.
    """
    num_old, num_new = metadata.num_blocks, source.shape[0]
    place = jnp.arange(num_new, dtype=jnp.int32)
    target = jnp.full((num_old,), num_new, jnp.int32)
    target = target.at[source].set(place, mode="drop", unique_indices=True)

    def renamed(ids: jax.Array) -> jax.Array:
        return target.at[ids].get(mode="fill", fill_value=num_new)

    def moved(rows: jax.Array, fill: int) -> jax.Array:
        return rows.at[source].get(mode="fill", fill_value=fill)

    # The ring keeps its room for as many ids, and holes, for each block.
    room = metadata.free_blocks.ids.shape[0] // num_old * num_new
    ring = Ring.of(
        jnp.pad(free.ids, (0, room - num_new), constant_values=num_new),
        head=jnp.int32(0),
        span=free.num,
        count=free.num,
        fewest=free.fewest,
    )
    tokens = metadata.tokens
    metadata = dataclasses.replace(
        metadata,
        block_tables=renamed(metadata.block_tables),
        reference_counts=moved(metadata.reference_counts, 0),
        free_blocks=ring,
        tokens=None if tokens is None else moved(tokens, -1),
    )
    return rebuilding.rename_blocks(metadata, renamed, moved, free.ids)


def count_compaction(metadata: Metadata, compacts: jax.Array) -> Metadata:
    """Count a compaction, if it is one, bool[], and note the clock."""
    metadata = counters.add(metadata, {Counter.COMPACTIONS: compacts})
    rows = metadata.counters
    last = jnp.where(compacts, rows[Counter.CLOCK], rows[Counter.LAST_COMPACTION])
    rows = rows.at[int(Counter.LAST_COMPACTION)].set(last)
    return dataclasses.replace(metadata, counters=rows)
