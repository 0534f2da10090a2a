"""Renumbering of a group's blocks, for `compact` and `resize`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import requests, ring
from jkv.operations import gather, is_first, running_sum, scatter
from jkv.state import BlockGroup, Metadata
from jkv.status import Counter


@jax.jit
def in_order(group: BlockGroup) -> tuple[jax.Array, jax.Array]:
    """Return the blocks in the order of `compact`, i32[N], and the number of live ones.

    Live blocks are ordered by their first table entry, followed by the free ones in
    eviction order.
    """
    num_blocks = group.num_blocks
    entries = group.block_tables.reshape(-1)
    firsts = is_first(entries, num_blocks) & (entries < num_blocks)
    blocks = jnp.zeros((num_blocks,), jnp.int32)
    blocks, num_live = _extend(blocks, jnp.int32(0), entries, firsts)
    ids, num_free = ring.in_order(group.free_blocks)
    is_free = jnp.arange(num_blocks, dtype=jnp.int32) < num_free
    return _extend(blocks, num_live, ids, is_free)[0], num_live


def _extend(
    blocks: jax.Array, count: jax.Array, ids: jax.Array, chosen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Write the chosen ids, in order, after the first `count` blocks."""
    ranks = count + running_sum(chosen.astype(jnp.int32))
    index = jnp.where(chosen, ranks - 1, blocks.shape[0])
    return scatter(blocks, index, ids), ranks[-1]


class FreeBlocks(NamedTuple):
    """The free blocks of a renumbered pool."""

    ids: Any  # i32[N'], new ids in ring order, padded with N'
    num: Any  # i32[]
    fewest: Any  # i32[], minimum count so far
    forgotten: Any = None  # i32[], cached blocks dropped


def renumber(
    metadata: Metadata, number: int, source: jax.Array, free: FreeBlocks
) -> Metadata:
    """Renumber the blocks of a group.

    Args:
      metadata: the metadata; the group has N blocks.
      source: i32[N'], distinct old ids of the blocks; N or above for new ones.
      free: the free blocks after the call.
    """
    group = metadata.groups[number]
    num_old, num_new = group.num_blocks, source.shape[0]
    new_id = jnp.arange(num_new, dtype=jnp.int32)
    target = jnp.full((num_old,), num_new, jnp.int32)
    target = scatter(target, source, new_id, unique=True)

    def renamed(ids: jax.Array) -> jax.Array:
        return gather(target, ids, fill=num_new)

    def moved(rows: jax.Array, fill: int) -> jax.Array:
        return gather(rows, source, fill=fill)

    tokens, kept = group.tokens, group.free_blocks.kept
    if kept is not None:
        # A new block is older than all entered ones.
        entered = moved(kept.entered - kept.num_entered, 2**31) + kept.num_entered
        kept = dataclasses.replace(
            kept,
            classes=moved(kept.classes, 0),
            kept_until=moved(kept.kept_until, 0),
            entered=entered,
        )
    refilled = ring.refill(group.free_blocks, free.ids, free.num, kept)
    if free.fewest is not None:
        refilled = refilled.with_numbers(fewest=free.fewest)
    if free.forgotten is not None:
        refilled = refilled.added(free.forgotten, forgotten=1)
    group = dataclasses.replace(
        group,
        block_tables=renamed(group.block_tables),
        reference_counts=moved(group.reference_counts, 0),
        free_blocks=refilled,
        tokens=None if tokens is None else moved(tokens, -1),
    )
    metadata = metadata.with_group(number, group)
    return metadata.index.rename(metadata, number, renamed, moved)


def count_compaction(metadata: Metadata) -> Metadata:
    """Count a compaction, and store its tick."""
    metadata = requests.add_counts(metadata, {Counter.COMPACTIONS: jnp.int32(1)})
    rows = metadata.sequences.counters
    rows = rows.at[int(Counter.LAST_COMPACTION)].set(rows[int(Counter.CLOCK)])
    return metadata.with_sequences(counters=rows)
