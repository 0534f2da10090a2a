"""Decoding: the blocks of all one-row requests as one flat list.

The (request, block) pairs are listed request after request, and each trip of the loop
takes the next few, so the cost follows the sum of the context lengths. A trip covers
consecutive requests, so one slice update joins its sums with earlier ones. The method
combines the split softmax of Flash-Decoding with the load-balanced schedule of
FlashInfer (arXiv 2501.01005).

Only the first and last block of a sequence can hold masked slots (past the end, or left
of the window). These edge blocks are processed first, in a loop that masks their
contents; the loop over inner blocks saves that pass.

Symbols: `B` requests; `P` lanes, one for each piece of `W` consecutive blocks of a
trip.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import Call, Requests
from jkv.attention.softmax import HIDDEN, Sums, empty_sums, finish_sums, join_sums
from jkv.attention.xla.shared import Tiles, attend_shared, cut_runs, prefixes_of
from jkv.attention.xla.tiles import (
    MAX_LANES,
    TRIP_BYTES,
    Lanes,
    attend_lanes,
    divide_up,
    multiply,
    quotient,
)
from jkv.operations import fori_loop, gather

# Tokens of a piece of consecutive blocks: longer pieces are quicker to join, shorter
# ones waste less at the end of a request.
_PIECE_TOKENS = 32


class WorkList(NamedTuple):
    """One-row requests by rank; requests with inner blocks come first.

    Arrays over ranks are padded by `P`, so that slices of `P` ranks stay inside.
    """

    request: jax.Array  # i32[B + P]
    first: jax.Array  # i32[B + P], first inner column
    last: jax.Array  # i32[B + P], column of the last block, an edge
    ends: jax.Array  # i32[B + P], pieces up to and including this rank
    rank: jax.Array  # i32[B], of each request; B + P if not listed
    num_requests: jax.Array  # i32[]
    num_pieces: jax.Array  # i32[]


class Walk(NamedTuple):
    """The loop-invariant inputs of both loops, and the sizes of a trip."""

    call: Call
    queries: jax.Array  # f32[R, K, G, D], scaled
    contexts: jax.Array  # i32[B], local tokens up to the last row's position
    window: jax.Array | None  # i32[] or i32[B], sliding window in local tokens
    work: WorkList
    piece_blocks: int  # blocks of a piece
    num_lanes: int  # pieces of a trip
    num_segments: int  # most requests of a trip, and edges of a trip
    tiles: Tiles | None  # shared prefixes, which are processed first


def attend_decode(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
) -> tuple[jax.Array, jax.Array]:
    """Compute the rows of one-row requests, f32[R, K, G, Dv] and f32[R, K, G].

    Other rows are zeros and -inf.
    """
    walk = _plan_walk(call, queries)
    sums = _start_sums(walk)
    if walk.tiles is not None:
        sums = attend_shared(call, queries, walk.tiles, walk.work.rank, sums)
    num_trips = divide_up(walk.work.num_requests, walk.num_segments)
    take_edges = functools.partial(_take_edges, walk)
    sums = fori_loop(jnp.int32(0), num_trips, take_edges, sums)
    num_trips = divide_up(walk.work.num_pieces, walk.num_lanes)
    take_pieces = functools.partial(_take_pieces, walk)
    sums = fori_loop(jnp.int32(0), num_trips, take_pieces, sums)
    return _finish_rows(walk, sums)


def _plan_walk(call: Call, queries: jax.Array) -> Walk:
    """Choose the sizes of a trip, and list the work."""
    pools, num_requests = call.pools, call.num_requests
    head_dim = max(queries.shape[3], pools.value_dim)
    block_bytes = 4 * pools.num_kv_heads * pools.block_size * head_dim
    piece_blocks = max(1, _PIECE_TOKENS // pools.block_size)
    num_lanes = min(TRIP_BYTES // (block_bytes * piece_blocks), MAX_LANES)
    most_pieces = num_requests * -(-call.max_blocks // piece_blocks)
    num_lanes = max(1, min(num_lanes, most_pieces))
    requests, window = call.of_last_rows()
    shared = prefixes_of(call)
    tiles = None if shared is None else cut_runs(shared)
    work = list_work(
        requests,
        window,
        pools.block_size,
        skip=None if tiles is None else tiles.skip,
        piece_blocks=piece_blocks,
        padding=num_lanes,
    )
    # A trip covers at most one request per lane.
    num_segments = min(num_lanes, num_requests)
    contexts = requests.context_lengths
    sizes = piece_blocks, num_lanes, num_segments
    return Walk(call, queries, contexts, window, work, *sizes, tiles)


def list_work(
    requests: Requests,  # of the call; requests of several rows are not listed
    window: jax.Array | None,  # i32[] or i32[B]; None for full attention
    block_size: int,  # T
    *,
    # i32[B], leading columns to skip per request; only without a window
    skip: jax.Array | None,
    piece_blocks: int,  # blocks of a piece
    padding: int,  # P
) -> WorkList:
    """Rank the one-row requests and count the pieces between their edges."""
    context = requests.context_lengths
    listed = (requests.query_lengths == 1) & (context > 0)
    last = quotient(jnp.maximum(context - 1, 0), block_size)
    first = jnp.zeros_like(last) if skip is None else skip
    if window is not None:
        listed &= window > 0
        first = quotient(jnp.maximum(context - window, 0), block_size) + 1
    counts = divide_up(jnp.maximum(last - first, 0), piece_blocks)
    counts = jnp.where(listed, counts, 0)

    # Requests without pieces go last, so that a trip's ranks are consecutive.
    has_pieces = counts > 0
    is_long, is_short = (
        mask.astype(jnp.int32) for mask in (has_pieces, listed & ~has_pieces)
    )
    each = jnp.stack([is_long, is_short, counts])
    num_long, num_short, num_pieces = jnp.cumsum(each, axis=1, dtype=jnp.int32)
    num_requests = num_long[-1] + num_short[-1]
    rank = jnp.where(has_pieces, num_long, num_long[-1] + num_short) - 1
    size = context.shape[0] + padding
    rank = jnp.where(listed, rank, size)
    request = jnp.zeros(size, jnp.int32)
    request = request.at[rank].set(
        jnp.arange(context.shape[0], dtype=jnp.int32), mode="drop", unique_indices=True
    )
    # Ranks follow the order of the requests as long as they have pieces.
    ranks = jnp.arange(size, dtype=jnp.int32)
    return WorkList(
        request=request,
        first=gather(first, request),
        last=gather(last, request),
        ends=jnp.where(
            ranks < num_long[-1], gather(num_pieces, request), num_pieces[-1]
        ),
        rank=rank,
        num_requests=num_requests,
        num_pieces=num_pieces[-1],
    )


def _start_sums(walk: Walk) -> Sums:
    """Return the sums over no tokens, f32[B + P, K, G, ...], by rank."""
    call, by_group = walk.call, walk.queries.shape[1:3]
    sinks = None if call.sinks is None else call.sinks.reshape(1, *by_group)
    num_ranks = walk.work.request.shape[0]
    return empty_sums((num_ranks, *by_group), call.pools.value_dim, sinks)


def _take_edges(walk: Walk, trip: jax.Array, sums: Sums) -> Sums:
    """Add the edge blocks of the next requests to their sums."""
    base = trip * walk.num_segments
    rank = base + jnp.arange(walk.num_segments, dtype=jnp.int32)
    lanes = _find_edges(walk, rank, trip < 0)
    found = attend_lanes(walk.call, walk.queries, lanes, mask_values=True)
    old = _slice(sums, base, walk.num_segments)
    return _update(sums, base, join_sums(old, found))


def _find_edges(walk: Walk, rank: jax.Array, never: jax.Array) -> Lanes:
    """Return the edge blocks of requests with the mask of their tokens."""
    call, work = walk.call, walk.work
    last = gather(work.last, rank)
    columns = last[:, None]
    is_edge = jnp.ones_like(columns, bool)
    if walk.window is not None:
        first = gather(work.first, rank) - 1
        columns = jnp.stack([first, last], axis=1)
        is_edge = jnp.stack([first < last, first <= last], axis=1)
    offsets = jnp.arange(call.pools.block_size, dtype=jnp.int32)
    tokens = columns[..., None] * call.pools.block_size + offsets[None, None]
    request = gather(work.request, rank)
    context = gather(walk.contexts, request)[:, None, None]
    visible = is_edge[..., None] & (tokens < context)
    if walk.window is not None:
        window = walk.window
        if window.ndim:
            window = gather(window, request)[:, None, None]
        visible &= tokens >= context - window
    row = gather(call.requests.query_starts, request)
    visible = visible.reshape(visible.shape[0], 1, -1)
    return Lanes(row, request, columns, visible, never)


def _take_pieces(walk: Walk, trip: jax.Array, sums: Sums) -> Sums:
    """Add the next pieces, one in each lane, to the sums of their requests."""
    index = trip * walk.num_lanes + jnp.arange(walk.num_lanes, dtype=jnp.int32)
    is_live = index < walk.work.num_pieces
    # Lanes without work repeat the last piece, which has no unwritten slots.
    index = jnp.minimum(index, walk.work.num_pieces - 1)
    ends = walk.work.ends
    rank = jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    lanes = _find_pieces(walk, rank, index, trip < 0)
    found = attend_lanes(walk.call, walk.queries, lanes, mask_values=False)
    base = rank[0]
    segments = jnp.arange(walk.num_segments, dtype=jnp.int32)
    owns = is_live[None, :] & ((rank - base)[None, :] == segments[:, None])
    old = _slice(sums, base, walk.num_segments)
    return _update(sums, base, _join_lanes(old, found, owns, rank - base))


def _find_pieces(
    walk: Walk, rank: jax.Array, index: jax.Array, never: jax.Array
) -> Lanes:
    """Return the inner pieces of the given ranks and list indices."""
    work = walk.work
    before = jnp.where(rank > 0, gather(work.ends, rank - 1), 0)
    start = gather(work.first, rank) + (index - before) * walk.piece_blocks
    columns = start[:, None] + jnp.arange(walk.piece_blocks, dtype=jnp.int32)[None]
    last = gather(work.last, rank)[:, None]
    # Only the last blocks of a piece may be missing.
    visible = jnp.repeat(columns < last, walk.call.pools.block_size, axis=1)[:, None]
    request = gather(work.request, rank)
    row = gather(walk.call.requests.query_starts, request)
    return Lanes(row, request, jnp.minimum(columns, last - 1), visible, never)


def _join_lanes(
    old: Sums,  # f32[M, K, G, ...] of consecutive requests
    found: Sums,  # f32[P, K, G, ...] of the lanes
    owns: jax.Array,  # bool[M, P], True if the lane is the request's
    segment: jax.Array,  # i32[P]
) -> Sums:
    """Join each lane's sums to the sums of its request."""
    lane_maxima = jnp.where(owns[..., None, None], found.maximum[None], HIDDEN)
    maximum = jnp.maximum(old.maximum, lane_maxima.max(axis=1))
    shrink = jnp.exp(old.maximum - maximum)
    lane_shrink = jnp.exp(found.maximum - gather(maximum, segment))
    lane_values = found.values * lane_shrink[..., None]
    # The product below adds up lanes with weights of 0, and 0 * NaN is NaN: a lane with
    # NaN or infinity passes it on in its total only.
    is_sound = jnp.isfinite(lane_values)
    lane_totals = found.total * lane_shrink
    lane_totals = jnp.where(is_sound.all(axis=-1), lane_totals, jnp.nan)
    lane_totals = jnp.where(owns[..., None, None], lane_totals[None], 0.0)
    joins = owns.astype(jnp.float32)
    lane_values = jnp.where(is_sound, lane_values, 0.0)
    values = multiply("mp,pkgd->mkgd", joins, lane_values)
    return Sums(
        maximum,
        old.total * shrink + lane_totals.sum(axis=1),
        old.values * shrink[..., None] + values,
    )


def _finish_rows(walk: Walk, sums: Sums) -> tuple[jax.Array, jax.Array]:
    """Map results from ranks to rows; rows without a listed request are empty."""
    num_rows, num_requests = walk.call.num_rows, walk.call.num_requests
    rank = jnp.full(num_rows, -1, jnp.int32)
    starts = walk.call.requests.query_starts
    starts = jnp.where(walk.work.rank < num_requests, starts, num_rows)
    rank = rank.at[starts].set(walk.work.rank, mode="drop")
    by_row = Sums(*(gather(array, rank) for array in sums))
    return finish_sums(by_row, (rank >= 0)[:, None, None])


def _slice(sums: Sums, base: jax.Array, size: int) -> Sums:
    """Return the sums of `size` ranks from `base`, which must be >= 0."""
    cut = functools.partial(lax.dynamic_slice_in_dim, allow_negative_indices=False)
    return Sums(*(cut(array, base, size) for array in sums))


def _update(sums: Sums, base: jax.Array, part: Sums) -> Sums:
    """Write sums back at `base`, the inverse of `_slice`."""
    put = functools.partial(
        lax.dynamic_update_slice_in_dim, axis=0, allow_negative_indices=False
    )
    pairs = zip(sums, part, strict=True)
    return Sums(*(put(array, new, base) for array, new in pairs))
