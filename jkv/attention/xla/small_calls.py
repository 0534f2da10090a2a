"""Calls so small that all rows fit side by side, each with the blocks of its context.

What one trip of `decode.py` would gather at most holds every context of such a call. So
the rows go through their contexts together, some columns of the block tables at a time,
as far as the longest reaches: no list of work, no tiles, and a fifth of the operations
to compile. Small models, examples and tests are such calls.

Symbols: `R` rows, `W` columns of a trip.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.attention.call import Call
from jkv.attention.softmax import Sums, empty_sums, finish_sums, join_sums
from jkv.attention.xla.decode import MAX_LANES, TRIP_BYTES
from jkv.attention.xla.lanes import Lanes, attend_lanes
from jkv.attention.xla.operations import divide_up, quotient
from jkv.sharding.loops import fori_loop

# Keys (or values) gathered in one trip, in float32: less follows the contexts more
# closely, more shares the cost of a trip.
_ROWS_TRIP_BYTES = 2**18


class Owners(NamedTuple):
    """Whose token each row is."""

    request: jax.Array  # i32[R]
    last: jax.Array  # i32[R], the last token in the pools that it sees, or -1
    before: jax.Array | None  # i32[R], the last one before its window


def is_small(call: Call) -> bool:
    """Whether the contexts of all rows fit into one trip of decoding."""
    if max(call.num_rows, call.num_requests) > MAX_LANES:
        return False
    # Rows of one prompt gather the same blocks, each for itself.
    most = TRIP_BYTES if call.is_decoding else TRIP_BYTES // 4
    return call.max_blocks * _column_bytes(call) <= most


def _column_bytes(call: Call) -> int:
    """Return the bytes of one block of each row, in float32."""
    pools = call.pools
    token_bytes = 4 * pools.num_kv_heads * max(pools.keys.shape[4], pools.value_dim)
    return call.num_rows * pools.block_size * token_bytes


def attend_rows(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
) -> tuple[jax.Array, jax.Array]:
    """Return `f32[R, K, G, Dv]` and `f32[R, K, G]`."""
    rows, block_size = _locate_rows(call), call.pools.block_size
    width = min(max(1, _ROWS_TRIP_BYTES // _column_bytes(call)), call.max_blocks)
    end = divide_up(jnp.max(rows.last) + 1, width * block_size)
    sees, start = rows.last >= 0, jnp.int32(0)
    if rows.before is not None:
        sees &= rows.last > rows.before
        earliest = jnp.min(jnp.where(sees, rows.before, jnp.iinfo(jnp.int32).max))
        start = quotient(jnp.maximum(earliest, 0), width * block_size)
    by_group = queries.shape[1:3]
    sinks = None if call.sinks is None else call.sinks.reshape(1, *by_group)
    sums = empty_sums((call.num_rows, *by_group), call.pools.value_dim, sinks)
    take_columns = functools.partial(_take_columns, call, queries, rows, width)
    sums = fori_loop(start, end, take_columns, sums)
    return finish_sums(sums, sees[:, None, None])


def _locate_rows(call: Call) -> Owners:
    """Find the request of each row, and what it sees."""
    requests, row = call.requests, jnp.arange(call.num_rows, dtype=jnp.int32)
    place = row[:, None] - requests.query_starts[None]  # i32[R, B]
    owns = (place >= 0) & (place < requests.query_lengths[None])
    first = requests.context_lengths - requests.query_lengths
    # One request owns a row at most, so that a sum finds what it has.
    position = jnp.sum(jnp.where(owns, first[None] + place + 1, 0), axis=1) - 1
    request = jnp.arange(call.num_requests, dtype=jnp.int32)
    request = jnp.sum(jnp.where(owns, request[None], 0), axis=1)
    position = position.astype(jnp.int32)
    before = None
    if call.window is not None:
        before = call.find_held(position - call.window)
    return Owners(request.astype(jnp.int32), call.find_held(position), before)


def _take_columns(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
    rows: Owners,
    width: int,  # W
    trip: jax.Array,
    sums: Sums,  # f32[R, K, G, ...]
) -> Sums:
    """Add the tokens of the next columns to the sums of the rows."""
    block_size, num_rows = call.pools.block_size, call.num_rows
    column = trip * width + jnp.arange(width, dtype=jnp.int32)
    offset = jnp.arange(block_size, dtype=jnp.int32)
    token = (column * block_size)[:, None] + offset[None]  # i32[W, T]
    visible = token[None] <= rows.last[:, None, None]
    if rows.before is not None:
        visible &= token[None] > rows.before[:, None, None]
    lanes = Lanes(
        row=jnp.arange(num_rows, dtype=jnp.int32),
        request=rows.request,
        columns=jnp.broadcast_to(column[None], (num_rows, width)),
        visible=visible,
        never=trip < 0,
    )
    found = attend_lanes(call, queries, lanes, mask_values=True)
    return join_sums(sums, found)
