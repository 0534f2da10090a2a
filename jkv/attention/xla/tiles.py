"""Tiles: a few rows of one request, computed side by side with other tiles.

A tile is a lane, which reads its request's blocks once for all of its rows, a piece at
a time. Pieces are cut at multiples of a fixed number of tokens and joined in order, so
the result of a row does not depend on the other lanes. `attend_lanes` is one trip of a
loop: it gathers a piece in each lane and reduces them side by side.

A pool is `[L, N, K, T, D]`. Slicing a layer out, or converting the pool's dtype inside
jit, would copy it; so blocks are gathered by (layer, block) and only the gathered chunk
is decoded by its format. The operations are in the form cheapest for XLA, and round
nothing in between.

Symbols: `R` rows, `B` requests, `P` lanes of a trip; `W` consecutive blocks, or columns
of a block table, of a piece, and its `S = W * T` tokens; `Q` rows of a tile, which
share the axis of query heads except in the mask.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import Call, Stored
from jkv.attention.softmax import HIDDEN, Sums, empty_sums, finish_sums, join_sums
from jkv.formats.format import multiply_out
from jkv.operations import fori_loop, gather

# Bytes of float32 keys (or values) of a trip. Smaller chunks fit caches closer to the
# core, larger ones amortize the cost of a trip.
TRIP_BYTES = 2 * 2**20


# Joining costs lanes times requests, which would dominate with tiny blocks.
MAX_LANES = 64


# Prompts: rows of a tile, and tokens of a piece.
_MIN_PROMPT_ROWS, _MAX_PROMPT_ROWS = 16, 128
_PROMPT_TOKENS = 256

_WEIGH = "pkgs,pksd->pkgd"


class Lanes(NamedTuple):
    """The work of one trip: a piece of one request in each lane."""

    row: jax.Array  # i32[P], row of the queries
    request: jax.Array  # i32[P]
    columns: jax.Array  # i32[P, W], of its block table
    visible: jax.Array  # bool[P, Q, S]
    never: jax.Array  # bool[], always False, for `read_twice`


class Gathered(NamedTuple):
    """Gathered pieces in float32, flat and by head."""

    flat_keys: jax.Array  # f32[P * K * W, T * D]
    flat_values: jax.Array  # f32[P * K * W, T * Dv]
    keys: jax.Array  # f32[P, K, S, D]
    values: jax.Array  # f32[P, K, S, Dv]
    key_factor: jax.Array | None  # f32[P, K, S], factor of each token's key
    value_factor: jax.Array | None  # f32[P, K, S]


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


def attend_lanes(
    call: Call,  # provides pools and block tables
    # f32[R, K, Q * G, D], scaled; of all rows, or of all tiles of Q rows
    queries: jax.Array,
    lanes: Lanes,
    *,
    mask_values: bool,  # True if blocks may hold slots that no row attends to
) -> Sums:
    """Return the softmax sums of each lane's piece, f32[P, K, Q * G, ...]."""
    gathered, marks = gather_lanes(call, lanes), None
    # With more scores than elements, mask and scale the elements.
    most = max(call.pools.head_dim, call.pools.value_dim)
    is_wide = lanes.visible.shape[1] > 1 and queries.shape[2] > most
    if is_wide:
        gathered, marks = _break_apart(gathered, lanes.visible.any(axis=1))
    elif mask_values:
        gathered = _hide_values(gathered, lanes.visible.any(axis=1))
    hidden = read_twice(gathered.flat_keys, lanes.never, HIDDEN)
    scores = _score_pieces(call, gather(queries, lanes.row), gathered)
    if marks is not None:
        scores += marks[:, :, None]
    scores = _hide_scores(scores, lanes.visible, hidden)
    sums = _sum_pieces(scores, gathered, lanes.visible, is_sound=is_wide)
    total = sums.total + read_twice(gathered.flat_values, lanes.never, 0.0)
    return sums._replace(total=total)


def find_blocks(call: Call, lanes: Lanes) -> jax.Array:
    """Return the ids of the lanes' blocks, i32[P, W]."""
    table = gather(call.requests.seq_ids, lanes.request)[:, None]
    return gather(call.requests.block_tables, (table, lanes.columns))


def gather_lanes(call: Call, lanes: Lanes) -> Gathered:
    """Gather the lanes' blocks, each once, by their block tables."""
    pools, blocks = call.pools, find_blocks(call, lanes)

    def by_head(flat: jax.Array, head_dim: int) -> jax.Array:
        return flat.reshape(blocks.shape[0], pools.num_kv_heads, -1, head_dim)

    flat_keys, key_factor = gather_pieces(pools.stored_keys, call.layer, blocks)
    keys = by_head(flat_keys, pools.head_dim)
    if pools.stored_values is None:
        values = keys[..., : pools.value_dim]
        return Gathered(flat_keys, flat_keys, keys, values, key_factor, key_factor)
    flat_values, factor = gather_pieces(pools.stored_values, call.layer, blocks)
    values = by_head(flat_values, pools.value_dim)
    return Gathered(flat_keys, flat_values, keys, values, key_factor, factor)


def _break_apart(
    gathered: Gathered,
    seen: jax.Array,  # bool[P, S]
) -> tuple[Gathered, jax.Array]:
    """Apply the factors and zero non-finite values; return marks, f32[P, K, S]."""
    keys = multiply_out(gathered.keys, gathered.key_factor)
    values = multiply_out(gathered.values, gathered.value_factor)
    values, marks = set_broken_apart(values, seen[:, None, :, None])
    gathered = gathered._replace(
        keys=keys, values=values, key_factor=None, value_factor=None
    )
    return gathered, marks


def _hide_values(
    gathered: Gathered,
    seen: jax.Array,  # bool[P, S]
) -> Gathered:
    """Zero values that no row attends to: they may be NaN, and 0 * NaN is NaN."""
    values = jnp.where(seen[:, None, :, None], gathered.values, 0.0)
    factor = gathered.value_factor
    if factor is not None:
        factor = jnp.where(seen[:, None], factor, 0.0)
    return gathered._replace(values=values, value_factor=factor)


def _score_pieces(
    call: Call,
    rows: jax.Array,  # f32[P, K, Q * G, D], scaled
    gathered: Gathered,
) -> jax.Array:
    """Return the scores of each piece's tokens, f32[P, K, Q * G, S]."""
    scores = multiply("pkgd,pksd->pkgs", rows, gathered.keys)
    if gathered.key_factor is not None:
        scores *= gathered.key_factor[:, :, None]
    return cap_scores(scores, call.soft_cap)


def _hide_scores(
    scores: jax.Array,  # f32[P, K, Q * G, S]
    visible: jax.Array,  # bool[P, Q, S]
    hidden: jax.Array,  # f32[], score of a masked token
) -> jax.Array:
    num_rows = visible.shape[1]
    shape = (*scores.shape[:2], num_rows, -1, scores.shape[3])
    scores_by_row = scores.reshape(shape)  # f32[P, K, Q, G, S]
    seen = visible[:, None, :, None]
    return jnp.where(seen, scores_by_row, hidden).reshape(scores.shape)


def _sum_pieces(
    scores: jax.Array,  # f32[P, K, Q * G, S], masked
    gathered: Gathered,
    visible: jax.Array,  # bool[P, Q, S]
    *,
    is_sound: bool,  # True if all values are finite
) -> Sums:
    """Return the softmax sums of each piece, `f32[P, K, Q * G, ...]`."""
    maximum = scores.max(axis=3)
    weights = jnp.exp(scores - maximum[..., None])
    total = weights.sum(axis=3)
    num_rows, values = visible.shape[1], gathered.values
    seen = None
    if num_rows > 1 and not is_sound:  # rows differ in their masks
        seen = jnp.repeat(visible, scores.shape[2] // num_rows, axis=1)[:, None]
    if gathered.value_factor is not None:
        weights *= gathered.value_factor[:, :, None]
        weights = weights if seen is None else jnp.where(seen, weights, 0.0)
    summed = multiply(_WEIGH, weights, values)
    if seen is not None:
        # Checking the sums costs less than checking all values.
        is_finite = jnp.isfinite(summed).all()
        given = summed, weights, values, seen
        summed = lax.cond(is_finite, lambda sums, *_: sums, _sum_apart, *given)
    return Sums(maximum, total, summed)


def _sum_apart(
    _: jax.Array,  # f32[P, K, Q * G, Dv]
    weights: jax.Array,  # f32[P, K, Q * G, S]
    values: jax.Array,  # f32[P, K, S, Dv]
    seen: jax.Array,  # bool[P, 1, Q * G, S]
) -> jax.Array:
    """Recompute the sums so that non-finite values reach unmasked rows only."""
    values, marks = set_broken_apart(values, jnp.bool_(True))
    row_marks = jnp.where(seen, marks[:, :, None], 0.0).sum(axis=3)
    return multiply(_WEIGH, weights, values) + row_marks[..., None]


def gather_pieces(
    stored: Stored,
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[P, W], clamped into the pool
) -> tuple[jax.Array, jax.Array | None]:
    """Gather pieces of W blocks by head, f32[P * K * W, T * D].

    A head's blocks of a piece are contiguous, as one product needs. Also returns the
    factors, f32[P, K, W * T], or None. Out-of-range ids are clamped; the caller masks
    their contents.
    """
    num_heads = stored.parts["pool"].shape[2]
    heads = jnp.clip(blocks, 0, stored.num_blocks - 1)[:, None] * num_heads
    heads += jnp.arange(num_heads, dtype=jnp.int32)[None, :, None]
    parts = {
        # Free: as a view, a head of a block is a block of one head.
        name: _gather_part(
            array.reshape(array.shape[0], -1, 1, *array.shape[3:]),
            layer,
            heads.reshape(-1),
        )
        if array.ndim > 4
        else _gather_part(array, layer, blocks)
        for name, array in stored.parts.items()
    }
    numbers, factor = stored.format.get(parts)
    if factor is not None:
        factor = jnp.swapaxes(factor, 1, 2)
        factor = factor.reshape(*factor.shape[:2], -1)
    return numbers, factor


def _gather_part(
    array: jax.Array,  # [L, N, K, T, ...]
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[...]
) -> jax.Array:
    """Gather [..., K, T] of one number per row, or [C, K * T * D] of elements."""
    if array.ndim == 4:
        found: jax.Array = array.at[layer, blocks].get(mode="clip")
        return found
    return lax.platform_dependent(
        array,
        jnp.stack([jnp.full_like(blocks, layer), blocks], axis=-1),
        tpu=_gather_tiled,
        default=_gather_flat,
    )


def _gather_flat(
    pool: jax.Array,  # [L, N, K, T, D]
    starts: jax.Array,  # i32[C, 2], layer and block
) -> jax.Array:
    """Gather [C, K * T * D] from a flat view of the blocks.

    The view is free. XLA on CPU copies its long last axis with vector instructions, but
    unrolls an axis of 64 into single elements.
    """
    return _gather(pool.reshape(*pool.shape[:2], -1), starts)


def _gather_tiled(
    pool: jax.Array,  # [L, N, K, T, D]
    starts: jax.Array,  # i32[C, 2], layer and block
) -> jax.Array:
    """Gather [C, K * T * D] and flatten afterwards.

    TPUs tile the last two axes, so a flat view would copy the whole pool.
    """
    return _gather(pool, starts).reshape(starts.shape[0], -1)


def _gather(array: jax.Array, starts: jax.Array) -> jax.Array:
    """Return `array[starts[i, 0], starts[i, 1]]` for each i, with clamped starts."""
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, array.ndim - 1)),
        collapsed_slice_dims=(0, 1),
        start_index_map=(0, 1),
    )
    return lax.gather(
        array,
        starts,
        dimensions,
        slice_sizes=(1, 1, *array.shape[2:]),
        mode=lax.GatherScatterMode.CLIP,
    )


def read_twice(
    chunk: jax.Array,  # f32[P * K * W, T * D] from `gather_pieces`
    never: jax.Array,  # bool[], always False, but not a constant to the compiler
    otherwise: float,
) -> jax.Array:
    """Return `otherwise`, with a second use of the flat chunk.

    With its reshape as the only use, XLA fuses both and copies along the short axis,
    element by element: a third of the time of a decode step in JAX 0.10.2. Only newer
    versions respect an `optimization_barrier`.
    """
    return jnp.where(never, chunk[0, 0], jnp.float32(otherwise))


def multiply(equation: str, one: jax.Array, other: jax.Array) -> jax.Array:
    """Return an einsum in full float32 precision."""
    return jnp.einsum(equation, one, other, precision=lax.Precision.HIGHEST)


def set_broken_apart(
    tokens: jax.Array,  # f32[..., D]
    used: jax.Array,  # bool, to broadcast to `tokens`
) -> tuple[jax.Array, jax.Array]:
    """Zero NaN, infinite and unused elements; return the vectors and their marks.

    A product adds masked tokens with weights of 0, and 0 * NaN is NaN. So non-finite
    numbers are removed from it, and the token's mark, f32[...], NaN if it had any and
    else 0, is added to its score before the mask is applied.
    """
    is_sound = jnp.isfinite(tokens)
    marks = jnp.where(is_sound.all(axis=-1), 0.0, jnp.nan)
    return jnp.where(is_sound & used, tokens, 0.0), marks


def cap_scores(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Return `soft_cap * tanh(scores / soft_cap)`, or the scores without a cap."""
    if soft_cap is None:
        return scores
    return soft_cap * jnp.tanh(scores / soft_cap)


def quotient(number: jax.Array, size: int) -> jax.Array:
    """Return `number // size` for nonnegative operands.

    The operator `//` needs seven more operations for negative ones.
    """
    return lax.div(number, jnp.int32(size))


def divide_up(number: jax.Array, size: int) -> jax.Array:
    """Return `ceil(number / size)` for nonnegative operands."""
    return quotient(number + (size - 1), size)


def scale_queries(call: Call) -> jax.Array:
    """Return the scaled queries grouped by kv head, f32[R, K, G, D]."""
    scaled = call.queries.astype(jnp.float32) * call.scale
    return scaled.reshape(call.num_rows, call.pools.num_kv_heads, call.heads_per_kv, -1)
