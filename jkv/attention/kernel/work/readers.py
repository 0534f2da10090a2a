"""Inverted block tables: the requests that read each block.

The gradient of a block's keys and values is a sum over all rows that attend to it. One
program sums it, in the order of the requests, so it needs no atomics and is
deterministic. For this the columns of all tables are sorted by block id. Plain JAX on
small integers: `B` requests, `M` columns, `N` blocks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Call


class Readers(NamedTuple):
    """The columns of all tables, sorted by block id.

    Of the `B * M` columns, unused ones come last and belong to none of the
    `min(N, B * M)` blocks.
    """

    block: jax.Array  # i32[blocks], unique ids; arbitrary past the last
    first: jax.Array  # i32[blocks], first column of each block
    end: jax.Array  # i32[blocks], past its last column; at most `first` for no block
    request: jax.Array  # i32[columns]
    column: jax.Array  # i32[columns]


def list_readers(call: Call) -> Readers:
    """Return the readers of each block, ordered by request and column.

    Out-of-range ids are skipped: their reads are clamped, and have no gradient.
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
    return Readers(
        block=jnp.minimum(named[jnp.minimum(first, num_columns - 1)], num_blocks - 1),
        first=first,
        end=jnp.minimum(end, num_named),
        request=lax.div(index, jnp.int32(max_blocks)),
        column=lax.rem(index, jnp.int32(max_blocks)),
    )
