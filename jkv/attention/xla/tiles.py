"""Tiles: a few rows of one request, computed side by side with other tiles.

A tile is a lane, which reads its request's blocks once for all of its rows, a piece at
a time. Pieces are cut at multiples of a fixed number of tokens and joined in order, so
the result of a row does not depend on the other lanes. All calls but decoding in a
large cache use this loop, in different sizes:

* Small calls, with contexts that fit into one trip of `decode.py`. All lanes proceed
  together, some columns of the block tables at a time, up to the longest context: this
  needs no work list, and a fifth of the operations to compile. A lane is a row, or a
  tile if requests have a few rows each, as in verifying draft tokens.
* Batch-invariant calls (`by_position`). Float sums depend on their order. With sizes
  independent of the step, all products have one shape in every step, and the result of
  a row depends on its own context only (`jkv.generate(exact=)`). On the need for fixed
  shapes: Horace He and Thinking Machines Lab, "Defeating Nondeterminism in LLM
  Inference", 2025.
* Prompts, one tile of many rows at a time, with the online softmax of FlashAttention
  (arXiv 2205.14135). Trip counts are traced: fully masked pieces are not read, and a
  call without prompts makes no trip.

Symbols: `R` rows, `B` requests, `P` lanes of a trip, `Q` rows of a tile, `W` columns of
a piece, `S` tokens of a piece.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Call
from jkv.attention.softmax import Sums, empty_sums, finish_sums, join_sums
from jkv.attention.xla.lanes import (
    MAX_LANES,
    TRIP_BYTES,
    Lanes,
    attend_lanes,
    divide_up,
    quotient,
)
from jkv.indexing import gather
from jkv.sharding.loops import fori_loop

# Bytes of float32 keys (or values) of a trip: fewer follow the contexts more closely,
# more amortize the cost of a trip.
_COLUMNS_BYTES = 2**18


# Rows of a tile: a step that verifies seven draft tokens fits in one.
_SMALL_TILE_ROWS = 8


# Batch-invariant: tokens of a piece, or one block if it has more.
_POSITION_TOKENS = 64


# Batch-invariant, rows of a tile: a single row costs the products of all of them.
_POSITION_ROWS = 4

# Prompts: rows of a tile, and tokens of a piece.
_MIN_PROMPT_ROWS, _MAX_PROMPT_ROWS = 16, 128
_PROMPT_TOKENS = 256


class Readers(NamedTuple):
    """The range of tokens that the rows of each lane attend to."""

    request: jax.Array  # i32[P]
    last: jax.Array  # i32[P, Q], the last local token, or -1
    before: jax.Array | None  # i32[P, Q], the last token before the window


class Owners(NamedTuple):
    """The request of each row."""

    owns: jax.Array  # bool[R, B]
    rank: jax.Array  # i32[R, B], index within the request if it owns the row

    @classmethod
    def of(cls, call: Call) -> "Owners":
        """Return the ownership of a call's rows."""
        requests, row = call.requests, jnp.arange(call.num_rows, dtype=jnp.int32)
        rank = row[:, None] - requests.query_starts[None]
        return cls((rank >= 0) & (rank < requests.query_lengths[None]), rank)

    def pick(self, values: jax.Array) -> jax.Array:
        """Return the value of each row's request, i32[R or 1, B] to i32[R], else 0."""
        # A row has at most one request, so a sum selects its value.
        return jnp.sum(jnp.where(self.owns, values, 0), axis=1, dtype=jnp.int32)


class RowSlice(NamedTuple):
    """Consecutive rows of a call that cover a tile."""

    start: jax.Array  # i32[]
    valid: jax.Array  # bool[Q], True for rows of the tile
    heads_per_kv: int  # G

    def take(self, array: jax.Array) -> jax.Array:
        """Slice an array [R, K, G, ...] to [K, Q * G, ...]."""
        rows = lax.dynamic_slice_in_dim(array, self.start, self.valid.shape[0])
        rows = jnp.moveaxis(rows, 0, 1)
        return rows.reshape(rows.shape[0], -1, *rows.shape[3:])

    def put(self, array: jax.Array, rows: jax.Array) -> jax.Array:
        """Write the valid ones of rows [K, Q * G, ...] to an array [R, K, G, ...]."""
        num_rows, num_kv_heads = self.valid.shape[0], rows.shape[0]
        rows = rows.reshape(num_kv_heads, num_rows, -1, *rows.shape[2:])
        rows = jnp.moveaxis(rows, 1, 0)
        old = lax.dynamic_slice_in_dim(array, self.start, num_rows)
        valid = self.valid.reshape(-1, *(1,) * (rows.ndim - 1))
        rows = jnp.where(valid, rows, old)
        return lax.dynamic_update_slice_in_dim(array, rows, self.start, 0)


class RowTiles(NamedTuple):
    """The rows of all requests, cut into tiles."""

    call: Call
    tile_rows: int  # Q
    counts: jax.Array  # i32[B], tiles of each request
    ends: jax.Array  # i32[B], tiles of all requests up to and including this one

    @property
    def most(self) -> int:
        """The largest number of tiles."""
        spare = self.call.num_requests * (self.tile_rows - 1)
        return (self.call.num_rows + spare) // self.tile_rows

    def most_of_trips(self, num_lanes: int) -> int:
        """Return `most` rounded up to a multiple of `num_lanes`."""
        return -(-self.most // num_lanes) * num_lanes

    def locate(self, index: jax.Array) -> tuple[jax.Array, Readers]:
        """Return the rows of tiles i32[P], i32[P, Q], and their token ranges."""
        request, first = self._find_requests(index)
        offset = first[:, None] + jnp.arange(self.tile_rows, dtype=jnp.int32)[None]
        length = gather(self.call.requests.query_lengths, request)[:, None]
        valid = (offset < length) & (index < self.ends[-1])[:, None]
        readers = self._see(request, offset, length, valid)
        row = gather(self.call.requests.query_starts, request)[:, None] + offset
        return row, readers

    def locate_slice(self, index: jax.Array) -> tuple["RowSlice", Readers]:
        """Return the rows of a tile, i32[], as a slice, and its range with P = 1."""
        call, requests = self.call, self.call.requests
        request, first = self._find_requests(index[None])
        start = gather(requests.query_starts, request) + first
        # A slice past the last row would be clamped silently, so shift it here.
        excess = jnp.maximum(start + self.tile_rows - call.num_rows, 0)
        offset = jnp.arange(self.tile_rows, dtype=jnp.int32)[None]
        offset = (first - excess)[:, None] + offset
        length = gather(requests.query_lengths, request)[:, None]
        valid = (offset >= first[:, None]) & (offset < length)
        rows = RowSlice((start - excess)[0], valid[0], call.heads_per_kv)
        return rows, self._see(request, offset, length, valid)

    def _find_requests(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return each tile's request, and its first row within it, i32[P]."""
        request = jnp.sum(self.ends[None] <= index[:, None], axis=1, dtype=jnp.int32)
        before = jnp.where(request > 0, gather(self.ends, request - 1), 0)
        return request, (index - before) * self.tile_rows

    def _see(
        self,
        request: jax.Array,  # i32[P]
        offset: jax.Array,  # i32[P, Q], of rows within the request
        length: jax.Array,  # i32[P, 1], rows of the request
        valid: jax.Array,  # bool[P, Q], True for rows of the tile
    ) -> Readers:
        call = self.call
        context = gather(call.requests.context_lengths, request)[:, None]
        position = context - length + offset
        last, before = call.find_held(position), None
        if call.window is not None:
            before = call.find_held(position - call.window)
        if call.past is not None:
            last, before = call.past.limit(request, last, before)
        return Readers(request, jnp.where(valid, last, -1), before)

    def to_rows(
        self,
        # f32[tiles, K, Q * G, Dv] and f32[tiles, K, Q * G]
        found: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """Map results from tiles to rows; rows without a request are empty."""
        call, owners = self.call, Owners.of(self.call)
        first_tiles = self.ends - self.counts
        index = owners.pick(first_tiles[None] * self.tile_rows + owners.rank)
        is_owned = owners.owns.any(axis=1)[:, None, None]

        def by_row(array: jax.Array) -> jax.Array:
            num_tiles, num_kv_heads, _, *rest = array.shape
            shape = num_tiles, num_kv_heads, self.tile_rows, call.heads_per_kv, *rest
            rows = jnp.moveaxis(array.reshape(shape), 2, 1)
            rows = rows.reshape(-1, num_kv_heads, call.heads_per_kv, *rest)
            return gather(rows, index)

        output, lse = (by_row(array) for array in found)
        return (
            jnp.where(is_owned[..., None], output, 0.0),
            jnp.where(is_owned, lse, -jnp.inf),
        )


def is_small(call: Call) -> bool:
    """Return True if the contexts of all rows, or of all tiles, fit into one trip."""
    return _are_rows_small(call) or _are_tiles_small(call)


def attend_side_by_side(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
) -> tuple[jax.Array, jax.Array]:
    """Return f32[R, K, G, Dv] and f32[R, K, G] of a small call."""
    if _are_rows_small(call):
        width = _find_width(call, call.num_rows)
        return attend_contexts(call, queries, _locate_rows(call), width)
    # One lane per request: one trip suffices if no request has more rows than a tile.
    num_lanes, tiles = call.num_requests, cut_rows(call, _SMALL_TILE_ROWS)
    width = _find_width(call, num_lanes)
    return attend_tiles(queries, tiles, num_lanes=num_lanes, width=width)


def _are_rows_small(call: Call) -> bool:
    if max(call.num_rows, call.num_requests) > MAX_LANES:
        return False
    # Rows of one prompt gather the same blocks separately.
    most = TRIP_BYTES if call.is_decoding else TRIP_BYTES // 4
    return call.max_blocks * _column_bytes(call, call.num_rows) <= most


def _are_tiles_small(call: Call) -> bool:
    num_lanes = call.num_requests
    if num_lanes > MAX_LANES or call.num_rows > num_lanes * _SMALL_TILE_ROWS:
        return False
    return call.max_blocks * _column_bytes(call, num_lanes) <= TRIP_BYTES


def _column_bytes(call: Call, num_lanes: int) -> int:
    """Return the bytes of one block of each lane, in float32."""
    pools = call.pools
    token_bytes = 4 * pools.num_kv_heads * max(pools.head_dim, pools.value_dim)
    return num_lanes * pools.block_size * token_bytes


def _locate_rows(call: Call) -> Readers:
    """Return each row's request and token range, as tiles of one row."""
    requests, owners = call.requests, Owners.of(call)
    first = requests.context_lengths - requests.query_lengths
    position = owners.pick(first[None] + owners.rank + 1) - 1
    request = owners.pick(jnp.arange(call.num_requests, dtype=jnp.int32)[None])
    before = None
    if call.window is not None:
        before = call.find_held(position - call.window)[:, None]
    last = call.find_held(position)[:, None]
    if call.past is not None:
        last, before = call.past.limit(request, last, before)
    return Readers(request, last, before)


def _find_width(call: Call, num_lanes: int) -> int:
    """Return the columns of a trip, W."""
    width = max(1, _COLUMNS_BYTES // _column_bytes(call, num_lanes))
    return min(width, call.max_blocks)


def attend_by_position(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
) -> tuple[jax.Array, jax.Array]:
    """Compute batch-invariant attention, f32[R, K, G, Dv] and f32[R, K, G].

    Tiles are sorted by their number of pieces, so that the lanes of a trip have similar
    work.
    """
    pools, tiles = call.pools, cut_rows(call, _POSITION_ROWS)
    # Sizes independent of the step.
    width = max(1, _POSITION_TOKENS // pools.block_size)
    head_dim = max(queries.shape[3], pools.value_dim)
    piece_bytes = 4 * width * pools.block_size * pools.num_kv_heads * head_dim
    num_lanes = max(1, min(TRIP_BYTES // piece_bytes, MAX_LANES, tiles.most))
    order = _order_tiles(tiles, tiles.most_of_trips(num_lanes), width)
    return attend_tiles(queries, tiles, num_lanes=num_lanes, width=width, order=order)


def attend_prompts(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
    # f32[R, K, G, Dv] and f32[R, K, G], with the rows of other requests
    results: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Fill in the rows of requests with more than one row."""
    tiles, width = cut_prompts(call, min_rows=2)
    Results = tuple[jax.Array, jax.Array]

    def fill(index: jax.Array, results: Results) -> Results:
        tile, readers = tiles.locate_slice(index)
        rows = tile.take(queries)[None]
        output, lse = attend_contexts(call, rows, readers, width)
        return tile.put(results[0], output[0]), tile.put(results[1], lse[0])

    return fori_loop(jnp.int32(0), tiles.ends[-1], fill, results)


def _order_tiles(
    tiles: RowTiles, num_tiles: int, width: int
) -> tuple[jax.Array, jax.Array]:
    """Sort tiles by descending pieces; return order and inverse, i32[tiles] each."""
    index = jnp.arange(num_tiles, dtype=jnp.int32)
    first, last = find_pieces(tiles.call, tiles.locate(index)[1], width)
    counts = last - first
    # Counting predecessors is cheaper than a sort for a few hundred tiles.
    is_before = (counts[None] > counts[:, None]) | (
        (counts[None] == counts[:, None]) & (index[None] < index[:, None])
    )
    rank = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    return jnp.zeros_like(index).at[rank].set(index, unique_indices=True), rank


def cut_rows(call: Call, tile_rows: int) -> RowTiles:
    """Cut the rows of each request into tiles of `tile_rows`."""
    counts = divide_up(call.requests.query_lengths, tile_rows)
    return RowTiles(call, tile_rows, counts, jnp.cumsum(counts, dtype=jnp.int32))


def cut_prompts(call: Call, *, min_rows: int) -> tuple[RowTiles, int]:
    """Cut requests of at least `min_rows` rows into prompt tiles; also return W."""
    # Small tiles waste less on short requests, large ones read each block less often.
    # The factor 5 / 4 gives requests of 64 rows and one longer one tiles of 64.
    mean_rows = -(-call.num_rows // call.num_requests)
    tile_rows = _MIN_PROMPT_ROWS
    while 5 * tile_rows < 4 * min(mean_rows, _MAX_PROMPT_ROWS):
        tile_rows *= 2
    requests, lengths = call.requests, call.requests.query_lengths
    lengths = jnp.where(lengths >= min_rows, lengths, 0)
    call = dataclasses.replace(call, requests=requests._replace(query_lengths=lengths))
    width = max(1, min(_PROMPT_TOKENS // call.pools.block_size, call.max_blocks))
    return cut_rows(call, min(tile_rows, call.num_rows)), width


def take_rows(queries: jax.Array, rows: jax.Array) -> jax.Array:
    """Gather the queries of tiles i32[P, Q] as f32[P, K, Q * G, D]."""
    tiles = jnp.moveaxis(gather(queries, rows), 1, 2)  # f32[P, K, Q, G, D]
    num_tiles, num_kv_heads, *_, head_dim = tiles.shape
    return tiles.reshape(num_tiles, num_kv_heads, -1, head_dim)


def attend_tiles(
    queries: jax.Array,  # f32[R, K, G, D], scaled
    tiles: RowTiles,
    *,
    num_lanes: int,  # P, tiles of a trip
    width: int,  # W
    # permutation of the tiles and its inverse, i32[tiles] each, padded to whole trips;
    # None for the identity
    order: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return f32[R, K, G, Dv] and f32[R, K, G] of the rows of all tiles."""
    call, num_tiles = tiles.call, tiles.most_of_trips(num_lanes)
    Results = tuple[jax.Array, jax.Array]

    def take(trip: jax.Array, results: Results) -> Results:
        base = trip * num_lanes
        index = base + jnp.arange(num_lanes, dtype=jnp.int32)
        if order is not None:
            index = lax.dynamic_slice_in_dim(order[0], base, num_lanes)
        rows, readers = tiles.locate(index)
        found = attend_contexts(call, take_rows(queries, rows), readers, width)
        output, lse = (
            lax.dynamic_update_slice_in_dim(old, new, base, 0)
            for old, new in zip(results, found, strict=True)
        )
        return output, lse

    shape = num_tiles, queries.shape[1], tiles.tile_rows * call.heads_per_kv
    results = (
        jnp.zeros((*shape, call.pools.value_dim), jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )
    num_trips = divide_up(tiles.ends[-1], num_lanes)
    output, lse = fori_loop(jnp.int32(0), num_trips, take, results)
    if order is not None:
        output, lse = gather(output, order[1]), gather(lse, order[1])
    return tiles.to_rows((output, lse))


def attend_contexts(
    call: Call,
    queries: jax.Array,  # f32[P, K, Q * G, D], scaled
    readers: Readers,
    width: int,  # W
) -> tuple[jax.Array, jax.Array]:
    """Return f32[P, K, Q * G, Dv] and f32[P, K, Q * G] of the lanes."""
    first, end = find_pieces(call, readers, width)
    sinks, shape = None, queries.shape[:3]
    if call.sinks is not None:
        sinks = call.sinks.reshape(1, shape[1], call.heads_per_kv)
        sinks = jnp.tile(sinks, (1, 1, readers.last.shape[1]))
    sums = empty_sums(shape, call.pools.value_dim, sinks)
    take = functools.partial(_take_piece, call, queries, readers, first, width)
    sums = fori_loop(jnp.int32(0), jnp.max(end - first), take, sums)
    sees = readers.last >= 0
    if readers.before is not None:
        sees &= readers.last > readers.before
    return finish_sums(sums, jnp.repeat(sees, call.heads_per_kv, axis=1)[:, None])


def find_pieces(
    call: Call, readers: Readers, width: int
) -> tuple[jax.Array, jax.Array]:
    """Return the range of pieces that each lane attends to, i32[P] each."""
    size = width * call.pools.block_size
    end = divide_up(readers.last.max(axis=1) + 1, size)
    if readers.before is None:
        return jnp.zeros_like(end), end
    # The first row of a tile has the earliest window.
    first = quotient(jnp.maximum(readers.before[:, 0] + 1, 0), size)
    return jnp.minimum(first, end), end


def _take_piece(
    call: Call,
    queries: jax.Array,  # f32[P, K, Q * G, D], scaled
    readers: Readers,
    first: jax.Array,  # i32[P]
    width: int,  # W
    trip: jax.Array,
    sums: Sums,  # f32[P, K, Q * G, ...]
) -> Sums:
    """Add the next piece of each lane's context to its sums.

    A fully masked piece leaves a row's sums bit-identical: behind the row's tokens it
    is multiplied by exp(HIDDEN - maximum) = 0, and before them its sums are discarded
    by the same factor.
    """
    lanes = find_lanes(call, readers, first + trip, width, never=trip < 0)
    return join_sums(sums, attend_lanes(call, queries, lanes, mask_values=True))


def find_lanes(
    call: Call,
    readers: Readers,
    piece: jax.Array,  # i32[P], index of each lane's piece
    width: int,  # W
    *,
    never: jax.Array,
) -> Lanes:
    """Return the blocks of each lane's piece, and the mask of their tokens."""
    size = width * call.pools.block_size
    column = jnp.arange(width, dtype=jnp.int32)
    token = jnp.arange(size, dtype=jnp.int32)
    token = (piece[:, None] * size + token[None])[:, None]
    visible = token <= readers.last[..., None]
    if readers.before is not None:
        visible &= token > readers.before[..., None]
    return Lanes(
        row=jnp.arange(piece.shape[0], dtype=jnp.int32),
        request=readers.request,
        columns=piece[:, None] * width + column[None],
        visible=visible,
        never=never,
    )
