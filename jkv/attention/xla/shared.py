"""Shared-prefix (cascade) attention for decoding requests.

Requests with shared leading blocks form the lanes of a tile: the query heads of all
lanes are multiplied with the same keys. A tile proceeds in chunks, and a chunk ends
where the shared prefix of a lane ends. So all remaining lanes attend to all tokens of a
chunk, and the results of finished lanes are discarded.

Symbols: `B` requests, `L` lanes of a tile, `W` columns of a chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import Call
from jkv.attention.shared_prefixes import SharedPrefixes
from jkv.attention.softmax import Sums, join_sums
from jkv.attention.xla.tiles import Lanes, attend_lanes, divide_up
from jkv.operations import fori_loop, gather, while_loop

# The value of `implementation=`, and the key of `Call.plans`.
NAME = "xla"

# For two lanes the products of a tile cost as much as the saved reads.
FEWEST = 3

# Lanes of a tile; each further size would add to the compile time of every layer.
_TILE_LANES = 8

# Tokens of a chunk.
_CHUNK_TOKENS = 256

# Past all columns.
_ALL = 2**31 - 1


def prefixes_of(call: Call) -> SharedPrefixes | None:
    """Return the step's plan of shared prefixes, if the call can use it."""
    if call.window is not None or call.part is not None:
        return None
    shared: SharedPrefixes | None = call.plans.get(NAME)
    return shared


class Tiles(NamedTuple):
    """Runs of requests that share a prefix, cut into tiles."""

    skip: jax.Array  # i32[B], leading columns that tiles compute for each request
    shared: SharedPrefixes
    counts: jax.Array  # i32[B], tiles of the run from each place on
    ends: jax.Array  # i32[B], tiles of all runs up to and including this one


class Tile(NamedTuple):
    """The lanes of a tile, and the range of columns that each shares."""

    request: jax.Array  # i32[L], the first one's table is read
    first: jax.Array  # i32[], column
    reach: jax.Array  # i32[L], end of the columns; at most `first` for no lane


def cut_runs(shared: SharedPrefixes) -> Tiles:
    """Cut runs of at least `FEWEST` requests into tiles of similar size."""
    columns = _count_columns(shared.common)
    skip = jnp.zeros_like(columns).at[shared.order].set(columns, unique_indices=True)
    is_run = shared.sizes >= FEWEST
    counts = jnp.where(is_run, divide_up(shared.sizes, _TILE_LANES), 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    return Tiles(skip, shared, counts, ends)


def _count_columns(common: jax.Array) -> jax.Array:
    """Return the leading columns that each place shares with `FEWEST - 1` others."""
    size, others = common.shape[0], FEWEST - 1
    behind = jnp.pad(common, (0, others))
    with_next = [behind[i : i + size] for i in range(1, FEWEST)]
    before = jnp.pad(functools.reduce(jnp.minimum, with_next), (others, 0))
    return functools.reduce(jnp.maximum, [before[i : i + size] for i in range(FEWEST)])


def attend_shared(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
    tiles: Tiles,
    rank: jax.Array,  # i32[B], index of each request's sums
    sums: Sums,  # f32[ranks, K, G, ...]
) -> Sums:
    """Add the attention over shared prefixes to the requests' sums."""

    def take(index: jax.Array, sums: Sums) -> Sums:
        tile = _locate_tile(tiles, index)
        is_lane = tile.reach > tile.first
        mine = jnp.where(is_lane, gather(rank, tile.request), sums.total.shape[0])
        old = Sums(*(gather(each, mine) for each in sums))
        new = _attend_tile(call, queries, tile, old)
        pairs = zip(sums, new, strict=True)
        return Sums(*(each.at[mine].set(part, mode="drop") for each, part in pairs))

    return fori_loop(jnp.int32(0), tiles.ends[-1], take, sums)


def _locate_tile(tiles: Tiles, index: jax.Array) -> Tile:
    """Return the lanes of a tile, and the columns that each shares with its run."""
    shared = tiles.shared
    start = jnp.sum(tiles.ends <= index, dtype=jnp.int32)
    count, size = gather(tiles.counts, start), gather(shared.sizes, start)
    # All tiles of a run but the last have the same number of lanes.
    in_tile = lax.div(size + count - 1, count)
    number = index - (gather(tiles.ends, start) - count)
    base = start + number * in_tile
    lane = jnp.arange(_TILE_LANES, dtype=jnp.int32)
    place = base + lane

    places = jnp.arange(shared.common.shape[0], dtype=jnp.int32)
    is_behind = places > start
    is_before = is_behind[None] & (places[None] <= place[:, None])
    reach = jnp.min(jnp.where(is_before, shared.common[None], _ALL), axis=1)
    is_first = is_behind & (places < start + FEWEST)
    end = jnp.min(jnp.where(is_first, shared.common, _ALL))
    is_lane = (lane < in_tile) & (place < start + size)
    return Tile(
        request=gather(shared.order, place),
        first=gather(shared.common, start),
        reach=jnp.where(is_lane, jnp.minimum(reach, end), 0),
    )


def _attend_tile(call: Call, queries: jax.Array, tile: Tile, sums: Sums) -> Sums:
    """Add the attention over a tile's columns to its lanes' sums, f32[L, K, G, ...]."""
    num_lanes, num_kv_heads, heads = sums.total.shape
    reach = jnp.repeat(tile.reach, heads)

    def as_heads(array: jax.Array) -> jax.Array:
        array = jnp.swapaxes(array, 0, 1)
        return array.reshape(1, num_kv_heads, num_lanes * heads, *array.shape[3:])

    def by_lane(array: jax.Array) -> jax.Array:
        array = array.reshape(num_kv_heads, num_lanes, heads, *array.shape[3:])
        return jnp.swapaxes(array, 0, 1)

    def take_chunk(carry: tuple[jax.Array, Sums]) -> tuple[jax.Array, Sums]:
        column, old = carry
        end, found = _attend_chunk(call, rows, tile, column)
        joined, is_along = join_sums(old, found), (reach > column)[None, None]
        return end, Sums(
            jnp.where(is_along, joined.maximum, old.maximum),
            jnp.where(is_along, joined.total, old.total),
            jnp.where(is_along[..., None], joined.values, old.values),
        )

    rows = as_heads(gather(queries, gather(call.requests.query_starts, tile.request)))
    end, start = jnp.max(tile.reach), Sums(*map(as_heads, sums))
    found = while_loop(lambda carry: carry[0] < end, take_chunk, (tile.first, start))[1]
    return Sums(*map(by_lane, found))


def _attend_chunk(
    call: Call,
    rows: jax.Array,  # f32[1, K, L * G, D], scaled
    tile: Tile,
    column: jax.Array,
) -> tuple[jax.Array, Sums]:
    """Return the column after a chunk, and the sums over its tokens for all lanes.

    The sums are valid for lanes with `reach` beyond `column`; the chunk ends at the
    least `reach` of these.
    """
    block_size = call.pools.block_size
    width = max(1, min(_CHUNK_TOKENS // block_size, call.max_blocks))
    is_along = tile.reach > column
    end = jnp.minimum(jnp.min(jnp.where(is_along, tile.reach, _ALL)), column + width)
    columns = column + jnp.arange(width, dtype=jnp.int32)
    lanes = Lanes(
        row=jnp.zeros(1, jnp.int32),
        request=tile.request[:1],
        columns=jnp.minimum(columns, end - 1)[None],
        visible=jnp.repeat(columns < end, block_size)[None, None],
        never=column < 0,
    )
    return end, attend_lanes(call, rows, lanes, mask_values=False)
