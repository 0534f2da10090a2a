"""Inverted block tables: the requests that read each block.

The gradient of a block's keys and values is a sum over all rows that attend to it. One
program sums it, in the order of the requests, so it needs no atomics and is
deterministic. For this the columns of all tables are sorted by block id. Plain JAX on
small integers: `B` requests, `M` columns, `N` blocks.

Small blocks are joined into runs, each the tokens of one program: up to `G` blocks at
consecutive columns, from a multiple of `G` on, with the same requests as readers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import Call


class Readers(NamedTuple):
    """The columns of all tables, sorted by block id.

    Of the `B * M` columns, unused ones come last and belong to none of the
    `min(N, B * M)` blocks.
    """

    # i32[blocks * G], unique ids: of a block and the rest of its run, G for each;
    # arbitrary past the last
    block: jax.Array
    length: jax.Array  # i32[blocks], blocks in the run
    first: jax.Array  # i32[blocks], first column of each block
    # i32[blocks], past its last column; at most `first` for no block, or in a run that
    # begins with another one
    end: jax.Array
    request: jax.Array  # i32[columns]
    column: jax.Array  # i32[columns]


def list_readers(call: Call, most_blocks: int = 1) -> Readers:
    """Return the readers of each block, ordered by request and column.

    Out-of-range ids are skipped: their reads are clamped, and have no gradient.

    Args:
      call: the call of attention.
      most_blocks: most blocks of a run, G.
    """
    requests, num_blocks = call.requests, call.pools.keys.shape[1]
    num_columns, max_blocks = call.num_requests * call.max_blocks, call.max_blocks
    tables = requests.block_tables[requests.seq_ids]  # i32[B, M]
    column = jnp.arange(max_blocks, dtype=jnp.int32)
    block_tokens = call.pools.block_size * call.num_parts
    is_named = column[None, :] * block_tokens < requests.context_lengths[:, None]
    is_named &= (requests.query_lengths > 0)[:, None]
    is_named &= (tables >= 0) & (tables < num_blocks)

    named = jnp.where(is_named, tables, num_blocks).reshape(-1)
    index = jnp.arange(num_columns, dtype=jnp.int32)
    named, index = lax.sort((named, index), num_keys=1, is_stable=True)
    before = jnp.concatenate([jnp.full((1,), -1, jnp.int32), named[:-1]])
    is_first = (named != before) & (named < num_blocks)
    size = min(num_blocks, num_columns)
    (first,) = jnp.nonzero(is_first, size=size, fill_value=num_columns)
    first = first.astype(jnp.int32)
    num_named = jnp.sum(is_named, dtype=jnp.int32)
    end = jnp.concatenate([first[1:], jnp.full((1,), num_columns, jnp.int32)])
    readers = Readers(
        block=jnp.minimum(named[jnp.minimum(first, num_columns - 1)], num_blocks - 1),
        length=jnp.ones(size, jnp.int32),
        first=first,
        end=jnp.minimum(end, num_named),
        request=lax.div(index, jnp.int32(max_blocks)),
        column=lax.rem(index, jnp.int32(max_blocks)),
    )
    if most_blocks == 1:
        return readers
    entry = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    entry = jnp.where(named < num_blocks, entry, size)
    at_column = jnp.zeros(num_columns, jnp.int32).at[index].set(entry)
    return _join_runs(readers, entry, at_column, max_blocks, most_blocks)


def _join_runs(
    readers: Readers,
    entry: jax.Array,  # i32[columns], the block of each sorted column, or `blocks`
    at_column: jax.Array,  # i32[columns], likewise in the order of the tables
    max_blocks: int,
    most_blocks: int,
) -> Readers:
    """Join blocks read by the same requests.

    A block belongs to the run of another one if all its columns are at one distance
    from columns of that block, and both have equally many: then the columns correspond
    to each other, in order.
    """
    size, num_columns = readers.first.shape[0], entry.shape[0]
    distance = lax.rem(readers.column, jnp.int32(most_blocks))
    table = readers.request * max_blocks
    leader = at_column[table + readers.column - distance]
    differs = (leader != jnp.roll(leader, 1)) | (distance != jnp.roll(distance, 1))
    differs &= entry == jnp.roll(entry, 1)
    num_different = jnp.concatenate(
        [jnp.zeros(1, jnp.int32), jnp.cumsum(differs, dtype=jnp.int32)]
    )
    end = jnp.maximum(readers.end, readers.first)
    is_uniform = num_different[end] == num_different[readers.first]
    num_readers = end - readers.first

    # The distance and leader of each block, by its first column.
    shown = jnp.minimum(readers.first, num_columns - 1)
    distance, leader = distance[shown], leader[shown]
    is_like_leader = is_uniform & (num_readers > 0) & (leader < size)
    is_like_leader &= num_readers == num_readers[jnp.minimum(leader, size - 1)]
    # Columns of a table from each block's on, as far as they belong to its run.
    steps = jnp.arange(1, most_blocks, dtype=jnp.int32)[None, :]
    columns = readers.column[shown][:, None] + steps
    place = jnp.minimum(columns, max_blocks - 1) + table[shown][:, None]
    next_entry = jnp.minimum(at_column[place], size - 1)  # i32[blocks, G - 1]
    own = jnp.arange(size, dtype=jnp.int32)[:, None]
    joins = is_like_leader[next_entry] & (leader[next_entry] == own)
    joins &= (distance[next_entry] == steps) & (columns < max_blocks)
    joins &= (distance == 0)[:, None] & (at_column[place] < size)
    length = 1 + jnp.sum(jnp.cumprod(joins.astype(jnp.int32), axis=1), axis=1)
    is_joined = is_like_leader & (distance > 0)
    is_joined &= distance < length[jnp.minimum(leader, size - 1)]
    rest = jnp.where(joins, readers.block[next_entry], readers.block[:, None])
    return readers._replace(
        block=jnp.concatenate([readers.block[:, None], rest], axis=1).reshape(-1),
        length=length.astype(jnp.int32),
        end=jnp.where(is_joined, readers.first, readers.end),
    )
