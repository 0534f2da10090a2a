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
from jax import lax

from jkv.attention.call import Call
from jkv.attention.xla.contexts import attend_contexts
from jkv.attention.xla.decode import MAX_LANES, TRIP_BYTES
from jkv.attention.xla.operations import divide_up
from jkv.attention.xla.row_tiles import Owners, Readers, cut_rows, take_rows
from jkv.sharding.loops import fori_loop

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
        return _attend_lanes(call, queries, _locate_rows(call))
    return _attend_tiles(call, queries)


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


def _attend_lanes(
    call: Call,
    queries: jax.Array,  # f32[P, K, Q * G, D], scaled
    readers: Readers,
) -> tuple[jax.Array, jax.Array]:
    """Go through all contexts; return `f32[P, K, Q * G, Dv]` and `f32[P, K, Q * G]`."""
    width = max(1, _COLUMNS_BYTES // _column_bytes(call, queries.shape[0]))
    return attend_contexts(call, queries, readers, min(width, call.max_blocks))


def _attend_tiles(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
) -> tuple[jax.Array, jax.Array]:
    """Take the tiles of all requests, as many at a time as there are requests.

    One trip does where no request has more rows than a tile.
    """
    num_lanes = call.num_requests
    tiles = cut_rows(call, _TILE_ROWS)
    most_trips = -(-tiles.most // num_lanes)
    Results = tuple[jax.Array, jax.Array]

    def take(trip: jax.Array, results: Results) -> Results:
        base = trip * num_lanes
        index = base + jnp.arange(num_lanes, dtype=jnp.int32)
        rows, readers = tiles.locate(index)
        found = _attend_lanes(call, take_rows(queries, rows), readers)
        output, lse = (
            lax.dynamic_update_slice_in_dim(old, new, base, 0)
            for old, new in zip(results, found, strict=True)
        )
        return output, lse

    shape = most_trips * num_lanes, queries.shape[1], _TILE_ROWS * call.heads_per_kv
    results = (
        jnp.zeros((*shape, call.pools.value_dim), jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )
    num_trips = divide_up(tiles.ends[-1], num_lanes)
    return tiles.to_rows(fori_loop(jnp.int32(0), num_trips, take, results))
