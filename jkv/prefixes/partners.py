"""The blocks of the other groups of layers, beside those that the index knows.

A block of the leading group names its partner in each other group, and the partner the
block that it stands beside: where both agree, they hold the same tokens (see
`jkv.prefixes.prefix_index`). What a group has given back has no partner, until
a sequence that still has the block commits the same text.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.metadata import allocator, tables
from jkv.metadata.mentions import find_equals
from jkv.prefixes import prefix_index
from jkv.prefixes.columns import Columns
from jkv.state import BlockGroup, Metadata


def pair_blocks(
    metadata: Metadata,
    number: int,
    columns: Columns,
    leaders: jax.Array,
    entered: jax.Array,
) -> Metadata:
    """Make a group's blocks found beside the leader's that stand for columns, i32[P].

    N_0 is not visible; some have just entered the index, bool[P]. A block that was
    found before replaces a sequence's own, as equal blocks of the leading group do. Of
    several that were not the first is kept.
    """
    group, no_leader = metadata.groups[number], metadata.leading.num_blocks
    is_visible, nothing = leaders < no_leader, group.num_blocks
    row = jnp.where(is_visible, columns.row, group.max_sequences)
    own = tables.blocks_at(group, row, columns.column)

    anew = jnp.where(entered & is_visible, leaders, no_leader)
    metadata = prefix_index.forget_partners(metadata, number, anew)
    known = prefix_index.find_partners(metadata, number, leaders)

    offered = (own < nothing) & (known == nothing)
    first = find_equals(leaders, offered).first
    lane = jnp.arange(own.shape[0], dtype=jnp.int32)
    chosen = offered & (first == lane)
    leader, partner = (
        jnp.where(chosen, ids, none)
        for ids, none in ((leaders, no_leader), (own, nothing))
    )
    metadata = prefix_index.set_partners(metadata, number, leader, partner)

    new = own.at[first].get(mode="fill", fill_value=nothing)
    other = jnp.where(known < nothing, known, new)
    replaced = (own < nothing) & (other < nothing) & (other != own)
    group = exchange(group, columns, own, other, replaced)
    return metadata.with_group(number, group)


def exchange(
    group: BlockGroup,
    columns: Columns,
    own: jax.Array,
    other: jax.Array,
    replaced: jax.Array,
) -> BlockGroup:
    """Give back own blocks, i32[P], for known equal ones where bool[P]."""
    nothing = group.num_blocks
    row = jnp.where(replaced, columns.row, group.max_sequences)
    block_tables = group.block_tables.at[row, columns.column].set(other, mode="drop")
    group = dataclasses.replace(group, block_tables=block_tables)
    group = allocator.add_references(group, jnp.where(replaced, other, nothing))
    return allocator.drop_references(group, jnp.where(replaced, own, nothing))
