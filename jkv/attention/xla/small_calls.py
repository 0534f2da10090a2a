"""Calls so small that all contexts fit side by side.

What one trip of `decode.py` would gather at most holds every context of such a call. So
lanes go through their contexts together, some columns of the block tables at a time, as
far as the longest reaches: no list of work, and a fifth of the operations to compile.
Small models, examples and tests are such calls.

A lane is a row. Where requests have a few rows each, as in a step that checks guesses,
it is a tile of one request's rows, which reads their blocks once for all of them.

Symbols: `R` rows, `P` lanes, `Q` rows of a lane, `W` columns of a trip.
"""

import jax
import jax.numpy as jnp

from jkv.attention.call import Call
from jkv.attention.xla.contexts import (
    Owners,
    Readers,
    attend_contexts,
    attend_tiles,
    cut_rows,
)
from jkv.attention.xla.decode import MAX_LANES, TRIP_BYTES

# Keys (or values) gathered in one trip, in float32: less follows the contexts more
# closely, more shares the cost of a trip.
_COLUMNS_BYTES = 2**18

# Rows of a tile: those of a step that checks seven guesses fit in one.
_TILE_ROWS = 8


def is_small(call: Call) -> bool:
    """Whether the contexts of all rows, or of all tiles, fit into one trip."""
    return _are_rows_small(call) or _are_tiles_small(call)


def attend_side_by_side(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
) -> tuple[jax.Array, jax.Array]:
    """Return `f32[R, K, G, Dv]` and `f32[R, K, G]`."""
    if _are_rows_small(call):
        width = _find_width(call, call.num_rows)
        return attend_contexts(call, queries, _locate_rows(call), width)
    # As many at a time as there are requests: one trip does where none has more rows
    # than a tile.
    num_lanes, tiles = call.num_requests, cut_rows(call, _TILE_ROWS)
    width = _find_width(call, num_lanes)
    return attend_tiles(queries, tiles, num_lanes=num_lanes, width=width)


def _are_rows_small(call: Call) -> bool:
    if max(call.num_rows, call.num_requests) > MAX_LANES:
        return False
    # Rows of one prompt gather the same blocks, each for itself.
    most = TRIP_BYTES if call.is_decoding else TRIP_BYTES // 4
    return call.max_blocks * _column_bytes(call, call.num_rows) <= most


def _are_tiles_small(call: Call) -> bool:
    num_lanes = call.num_requests
    if num_lanes > MAX_LANES or call.num_rows > num_lanes * _TILE_ROWS:
        return False
    return call.max_blocks * _column_bytes(call, num_lanes) <= TRIP_BYTES


def _column_bytes(call: Call, num_lanes: int) -> int:
    """Return the bytes of one block of each lane, in float32."""
    pools = call.pools
    token_bytes = 4 * pools.num_kv_heads * max(pools.head_dim, pools.value_dim)
    return num_lanes * pools.block_size * token_bytes


def _locate_rows(call: Call) -> Readers:
    """Find the request of each row, and what it sees."""
    requests, owners = call.requests, Owners.of(call)
    first = requests.context_lengths - requests.query_lengths
    position = owners.pick(first[None] + owners.rank + 1) - 1
    request = jnp.arange(call.num_requests, dtype=jnp.int32)
    before = None
    if call.window is not None:
        before = call.find_held(position - call.window)[:, None]
    last = call.find_held(position)[:, None]
    return Readers(owners.pick(request[None]), last, before)


def _find_width(call: Call, num_lanes: int) -> int:
    """Return the columns of a trip, W."""
    width = max(1, _COLUMNS_BYTES // _column_bytes(call, num_lanes))
    return min(width, call.max_blocks)
