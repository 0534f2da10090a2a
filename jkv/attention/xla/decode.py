"""Requests of one row: all their blocks in one flat list, taken a few at a time.

The (request, block) pairs follow each other, request after request, and each trip of
the loop takes the next few, whosever they are: the cost follows the sum of the context
lengths. A trip meets consecutive requests, so its sums join those of earlier trips in
one slice. The idea is the split softmax of Flash-Decoding with the load-balanced
schedule of FlashInfer (arXiv 2501.01005).

Only the first and last block of a sequence can hold slots that its row does not see
(an unwritten tail, tokens left of a window). These edge blocks come first, in a loop of
their own, masked with care; the blocks between need no mask on their contents, which
saves a pass over them.

Symbols: `P` lanes, one for each piece of `W` consecutive blocks that a trip takes.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Call
from jkv.attention.pools import Pools, gather_blocks, gather_scales, read_twice
from jkv.attention.softmax import HIDDEN, Sums, empty_sums, finish_sums, join_sums
from jkv.attention.xla.pieces import WorkList, list_work, take
from jkv.attention.xla.products import cap_scores, multiply

# Consecutive blocks of a request are taken together, about this many tokens: longer
# pieces are quicker to join, shorter ones waste less at the end of a request.
_PIECE_TOKENS = 32


# Keys (or values) gathered in one trip, in float32. Smaller chunks stay in the cache
# nearer to the core, larger ones share the cost of a trip.
_TRIP_BYTES = 2 * 2**20


# Joining costs lanes times requests; with tiny blocks it would outgrow the attention.
_MAX_LANES = 64


class Walk(NamedTuple):
    """What every trip of the two loops reads, and how much it takes."""

    call: Call
    queries: jax.Array  # f32[R, K, G, D], scaled
    work: WorkList
    piece_blocks: int  # blocks of a piece
    num_lanes: int  # pieces of a trip
    num_segments: int  # most requests that a trip meets, and edges of a trip


class Lanes(NamedTuple):
    """What one trip takes: a piece of one request in each lane."""

    rank: jax.Array  # i32[P], of the request
    columns: jax.Array  # i32[P, W], of its block table
    visible: jax.Array  # bool[P, W, T]
    never: jax.Array  # bool[], false, as `read_twice` wants it


class Gathered(NamedTuple):
    """Blocks as they came out of the pools, in float32, and by head."""

    flat_keys: jax.Array  # f32[P * W, K * T * D]
    flat_values: jax.Array  # f32[P * W, K * T * Dv]
    keys: jax.Array  # f32[P * W, K, T, D]
    values: jax.Array  # f32[P * W, K, T, Dv]
    key_scales: jax.Array | None  # f32[P * W, K, T]
    value_scales: jax.Array | None  # f32[P * W, K, T]


def attend_decode(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
) -> tuple[jax.Array, jax.Array]:
    """Return `f32[R, K, G, Dv]` and `f32[R, K, G]` of the requests with one row each;
    other rows are zeros and -inf.
    """
    walk = _plan_walk(call, queries)
    work, sums = walk.work, _start_sums(walk)
    for take_some, count, size in (
        (_take_edges, work.num_requests, walk.num_segments),
        (_take_pieces, work.num_pieces, walk.num_lanes),
    ):
        trip = functools.partial(take_some, walk)
        num_trips = (count + size - 1) // size
        sums = lax.fori_loop(jnp.int32(0), num_trips, trip, sums)
    return _finish_rows(walk, sums)


def _plan_walk(call: Call, queries: jax.Array) -> Walk:
    """Choose how much a trip takes, and list what there is to take."""
    pools, num_requests = call.pools, call.num_requests
    head_dim = max(queries.shape[3], pools.value_dim)
    block_bytes = 4 * pools.num_kv_heads * pools.block_size * head_dim
    piece_blocks = max(1, _PIECE_TOKENS // pools.block_size)
    num_lanes = min(_TRIP_BYTES // (block_bytes * piece_blocks), _MAX_LANES)
    most_pieces = num_requests * -(-call.max_blocks // piece_blocks)
    num_lanes = max(1, min(num_lanes, most_pieces))
    work = list_work(
        call.requests,
        call.window,
        pools.block_size,
        piece_blocks=piece_blocks,
        padding=num_lanes,
    )
    # No trip meets more requests than it has lanes, nor more than there are.
    num_segments = min(num_lanes, num_requests)
    return Walk(call, queries, work, piece_blocks, num_lanes, num_segments)


def _start_sums(walk: Walk) -> Sums:
    """Return the sums over no token, f32[B + P, K, G, ...], by rank."""
    call, by_group = walk.call, walk.queries.shape[1:3]
    sinks = None if call.sinks is None else call.sinks.reshape(1, *by_group)
    num_ranks = walk.work.request.shape[0]
    return empty_sums((num_ranks, *by_group), call.pools.value_dim, sinks)


def _take_edges(walk: Walk, trip: jax.Array, sums: Sums) -> Sums:
    """Add the edge blocks of the next requests to their sums."""
    base = trip * walk.num_segments
    rank = base + jnp.arange(walk.num_segments, dtype=jnp.int32)
    found = _attend_lanes(walk, _find_edges(walk, rank, trip < 0), mask_values=True)
    return _update(sums, base, join_sums(_slice(sums, base, walk.num_segments), found))


def _find_edges(walk: Walk, rank: jax.Array, never: jax.Array) -> Lanes:
    """Return the edge blocks of requests, and which of their tokens the row sees."""
    call, work = walk.call, walk.work
    last = take(work.last, rank)
    columns = last[:, None]
    is_edge = jnp.ones_like(columns, bool)
    if call.window is not None:
        first = take(work.first, rank) - 1
        columns = jnp.stack([first, last], axis=1)
        is_edge = jnp.stack([first < last, first <= last], axis=1)
    offsets = jnp.arange(call.pools.block_size, dtype=jnp.int32)
    tokens = columns[..., None] * call.pools.block_size + offsets[None, None]
    context = take(call.requests.context_lengths, take(work.request, rank))
    context = context[:, None, None]
    visible = is_edge[..., None] & (tokens < context)
    if call.window is not None:
        visible &= tokens >= context - call.window
    return Lanes(rank, columns, visible, never)


def _take_pieces(walk: Walk, trip: jax.Array, sums: Sums) -> Sums:
    """Add the next pieces, one in each lane, to the sums of their requests."""
    index = trip * walk.num_lanes + jnp.arange(walk.num_lanes, dtype=jnp.int32)
    lanes = _find_pieces(walk, index, trip < 0)
    found = _attend_lanes(walk, lanes, mask_values=False)
    base = lanes.rank[0]
    segment = lanes.rank - base
    segments = jnp.arange(walk.num_segments, dtype=jnp.int32)
    is_live = index < walk.work.num_pieces
    owns = is_live[None, :] & (segment[None, :] == segments[:, None])
    old = _slice(sums, base, walk.num_segments)
    return _update(sums, base, _join_lanes(old, found, owns, segment))


def _find_pieces(walk: Walk, index: jax.Array, never: jax.Array) -> Lanes:
    """Return pieces between edges by their place in the list of all.

    Lanes without work repeat the last piece, whose contents are sound.
    """
    work = walk.work
    index = jnp.minimum(index, work.num_pieces - 1)
    rank = jnp.sum(work.ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    before = jnp.where(rank > 0, take(work.ends, rank - 1), 0)
    start = take(work.first, rank) + (index - before) * walk.piece_blocks
    columns = start[:, None] + jnp.arange(walk.piece_blocks, dtype=jnp.int32)[None]
    last = take(work.last, rank)[:, None]
    visible = (columns < last)[..., None]
    visible = jnp.broadcast_to(visible, (*columns.shape, walk.call.pools.block_size))
    return Lanes(rank, jnp.minimum(columns, last - 1), visible, never)


def _attend_lanes(walk: Walk, lanes: Lanes, *, mask_values: bool) -> Sums:
    """Return the sums of each lane's tokens, `f32[P, K, G, ...]`."""
    request = take(walk.work.request, lanes.rank)
    gathered = _gather_lanes(walk.call, request, lanes.columns)
    seen = lanes.visible.reshape(-1, lanes.visible.shape[2])  # bool[P * W, T]
    if mask_values:
        gathered = _hide_values(gathered, seen)
    hidden = read_twice(gathered.flat_keys, lanes.never, HIDDEN)
    scores = _score_blocks(walk, request, gathered, lanes.columns.shape[1])
    scores = jnp.where(seen[:, None, None, :], scores, hidden)
    sums = _sum_pieces(scores, gathered, lanes.columns.shape)
    total = sums.total + read_twice(gathered.flat_values, lanes.never, 0.0)
    return sums._replace(total=total)


def _gather_lanes(
    call: Call,
    request: jax.Array,  # i32[P]
    columns: jax.Array,  # i32[P, W]
) -> Gathered:
    """Read the lanes' blocks, each once, by way of the block tables."""
    pools, requests = call.pools, call.requests
    table = take(requests.seq_ids, request)[:, None]
    blocks = take(requests.block_tables, table, columns).reshape(-1)
    flat_keys = gather_blocks(pools.keys, call.layer, blocks, pools.kv_dtype)
    keys = flat_keys.reshape(-1, *pools.keys.shape[2:])
    if pools.values is None:
        flat_values, values = flat_keys, keys[..., : pools.value_dim]
    else:
        flat_values = gather_blocks(pools.values, call.layer, blocks, pools.kv_dtype)
        values = flat_values.reshape(-1, *pools.values.shape[2:])
    scales = _gather_scales(pools, call.layer, blocks)
    return Gathered(flat_keys, flat_values, keys, values, *scales)


def _gather_scales(
    pools: Pools,
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[P * W]
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the scales of the blocks' keys and values, f32[P * W, K, T] if any."""
    keys, values = (
        None if scales is None else gather_scales(scales, layer, blocks)
        for scales in (pools.key_scales, pools.value_scales)
    )
    return keys, keys if pools.values is None else values


def _hide_values(
    gathered: Gathered,
    seen: jax.Array,  # bool[P * W, T]
) -> Gathered:
    """Clear values that the row does not see: they may be NaN, and 0 * NaN is NaN."""
    values = jnp.where(seen[:, None, :, None], gathered.values, 0.0)
    value_scales = gathered.value_scales
    if value_scales is not None:
        value_scales = jnp.where(seen[:, None, :], value_scales, 0.0)
    return gathered._replace(values=values, value_scales=value_scales)


def _score_blocks(
    walk: Walk,
    request: jax.Array,  # i32[P]
    gathered: Gathered,
    width: int,
) -> jax.Array:
    """Return the scores of each block's tokens, f32[P * W, K, G, T]."""
    row = take(walk.call.requests.query_starts, jnp.repeat(request, width))
    scores = multiply("ckgd,cktd->ckgt", take(walk.queries, row), gathered.keys)
    # A scale per token is a factor on its scores and weights: fewer than elements.
    if gathered.key_scales is not None:
        scores *= gathered.key_scales[:, :, None, :]
    return cap_scores(scores, walk.call.soft_cap)


def _sum_pieces(
    scores: jax.Array,  # f32[P * W, K, G, T], masked
    gathered: Gathered,
    shape: tuple[int, ...],  # P, W
) -> Sums:
    """Return the softmax sums of each piece, `f32[P, K, G, ...]`."""
    maximum = scores.reshape(*shape, *scores.shape[1:]).max(axis=(1, 4))
    shift = jnp.repeat(maximum, shape[1], axis=0)
    weights = jnp.exp(scores - shift[..., None])
    total = weights.reshape(*shape, *scores.shape[1:]).sum(axis=(1, 4))
    if gathered.value_scales is not None:
        weights *= gathered.value_scales[:, :, None, :]
    summed = multiply("ckgt,cktd->ckgd", weights, gathered.values)
    summed = summed.reshape(*shape, *summed.shape[1:]).sum(axis=1)
    return Sums(maximum, total, summed)


def _join_lanes(
    old: Sums,  # f32[M, K, G, ...] of consecutive requests
    found: Sums,  # f32[P, K, G, ...] of the lanes
    owns: jax.Array,  # bool[M, P], whose lane it is
    segment: jax.Array,  # i32[P]
) -> Sums:
    """Join each lane's sums to those of its request."""
    lane_maxima = jnp.where(owns[..., None, None], found.maximum[None], HIDDEN)
    maximum = jnp.maximum(old.maximum, lane_maxima.max(axis=1))
    shrink = jnp.exp(old.maximum - maximum)
    lane_shrink = jnp.exp(found.maximum - take(maximum, segment))
    joins = owns.astype(jnp.float32)
    total = multiply("mp,pkg->mkg", joins, found.total * lane_shrink)
    values = multiply("mp,pkgd->mkgd", joins, found.values * lane_shrink[..., None])
    return Sums(
        maximum,
        old.total * shrink + total,
        old.values * shrink[..., None] + values,
    )


def _finish_rows(walk: Walk, sums: Sums) -> tuple[jax.Array, jax.Array]:
    """Bring results from ranks to rows; a row without a listed request sees nothing."""
    num_rows, num_requests = walk.call.num_rows, walk.call.num_requests
    rank = jnp.full(num_rows, -1, jnp.int32)
    starts = walk.call.requests.query_starts
    starts = jnp.where(walk.work.rank < num_requests, starts, num_rows)
    rank = rank.at[starts].set(walk.work.rank, mode="drop")
    by_row = Sums(*(take(array, rank) for array in sums))
    return finish_sums(by_row, (rank >= 0)[:, None, None])


def _slice(sums: Sums, base: jax.Array, size: int) -> Sums:
    return Sums(*(lax.dynamic_slice_in_dim(array, base, size) for array in sums))


def _update(sums: Sums, base: jax.Array, part: Sums) -> Sums:
    return Sums(
        *(
            lax.dynamic_update_slice_in_dim(array, new, base, 0)
            for array, new in zip(sums, part, strict=True)
        )
    )
