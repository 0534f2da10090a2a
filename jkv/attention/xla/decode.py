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
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Requests
from jkv.attention.pools import Pools, gather_blocks, gather_scales, read_twice
from jkv.attention.softmax import HIDDEN, Sums, empty_sums, finish_sums, join_sums

# Consecutive blocks of a request are taken together, about this many tokens: longer
# pieces are quicker to join, shorter ones waste less at the end of a request.
_PIECE_TOKENS = 32


# Keys (or values) gathered in one trip, in float32. Smaller chunks stay in the cache
# nearer to the core, larger ones share the cost of a trip.
_TRIP_BYTES = 2 * 2**20


# Joining costs lanes times requests; with tiny blocks it would outgrow the attention.
_MAX_LANES = 64


class WorkList(NamedTuple):
    """The requests of one row by rank, those with blocks between their edges first.

    Arrays over ranks are padded by `P`, so that slices of `P` ranks stay inside.
    """

    request: jax.Array  # i32[B + P]
    first: jax.Array  # i32[B + P], first column that is no edge
    last: jax.Array  # i32[B + P], column of the last block, an edge
    ends: jax.Array  # i32[B + P], pieces up to and with this rank
    rank: jax.Array  # i32[B], of each request; B + P for the others
    num_requests: jax.Array  # i32[]
    num_pieces: jax.Array  # i32[]


def attend_decode(
    queries: jax.Array,  # f32[R, K, G, D], scaled
    pools: Pools,
    layer: jax.Array,  # i32[]
    requests: Requests,
    *,
    window: jax.Array | None,  # i32[]
    soft_cap: float | None,
    sinks: jax.Array | None,  # f32[K, G]
) -> tuple[jax.Array, jax.Array]:
    """Return `f32[R, K, G, Dv]` and `f32[R, K, G]` of the requests with one row each;
    other rows are zeros and -inf.
    """
    num_rows = queries.shape[0]
    num_kv_heads, block_size = pools.num_kv_heads, pools.block_size
    value_dim = pools.value_dim
    num_requests, max_blocks = requests.seq_ids.shape[0], requests.block_tables.shape[1]
    block_bytes = 4 * num_kv_heads * block_size * max(queries.shape[3], value_dim)
    piece_blocks = max(1, _PIECE_TOKENS // block_size)
    num_lanes = min(_TRIP_BYTES // (block_bytes * piece_blocks), _MAX_LANES)
    num_lanes = max(1, min(num_lanes, num_requests * -(-max_blocks // piece_blocks)))
    # No trip meets more requests than it has lanes, nor more than there are.
    num_segments = min(num_lanes, num_requests)
    work = list_work(
        requests, window, block_size, piece_blocks=piece_blocks, padding=num_lanes
    )
    lanes = jnp.arange(num_lanes, dtype=jnp.int32)
    segments = jnp.arange(num_segments, dtype=jnp.int32)

    def attend(
        rank: jax.Array,  # i32[P]
        columns: jax.Array,  # i32[P, W]
        visible: jax.Array,  # bool[P, W, T]
        never: jax.Array,  # bool[]
        *,
        mask_values: bool,
    ) -> Sums:
        """Return the sums of P pieces of W blocks each, `f32[P, K, G, ...]`."""
        num_pieces, width = columns.shape
        request = work.request[rank]
        table_rows = requests.seq_ids[request][:, None]
        blocks = requests.block_tables[table_rows, columns].reshape(-1)
        flat_keys = gather_blocks(pools.keys, layer, blocks, pools.kv_dtype)
        keys = flat_keys.reshape(-1, *pools.keys.shape[2:])
        if pools.values is None:
            flat_values, values = flat_keys, keys[..., :value_dim]
        else:
            flat_values = gather_blocks(pools.values, layer, blocks, pools.kv_dtype)
            values = flat_values.reshape(-1, *pools.values.shape[2:])
        key_scales, value_scales = _scales(pools, layer, blocks)
        seen = visible.reshape(-1, visible.shape[2])  # bool[P * W, T]
        if mask_values:
            # Slots that the row does not see may hold NaN, and 0 * NaN is NaN.
            values = jnp.where(seen[:, None, :, None], values, 0.0)
            if value_scales is not None:
                value_scales = jnp.where(seen[:, None, :], value_scales, 0.0)

        rows = queries[requests.query_starts[jnp.repeat(request, width)]]
        scores = jnp.einsum(
            "ckgd,cktd->ckgt", rows, keys, precision=lax.Precision.HIGHEST
        )
        # A scale per token is a factor on its scores and weights: fewer than elements.
        if key_scales is not None:
            scores *= key_scales[:, :, None, :]
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        hidden = read_twice(flat_keys, never, HIDDEN)
        scores = jnp.where(seen[:, None, None, :], scores, hidden)
        pieces = (num_pieces, width)
        maximum = scores.reshape(*pieces, *scores.shape[1:]).max(axis=(1, 4))
        shift = jnp.repeat(maximum, width, axis=0)
        weights = jnp.exp(scores - shift[..., None])
        total = weights.reshape(*pieces, *scores.shape[1:]).sum(axis=(1, 4))
        if value_scales is not None:
            weights *= value_scales[:, :, None, :]
        summed = jnp.einsum(
            "ckgt,cktd->ckgd", weights, values, precision=lax.Precision.HIGHEST
        )
        summed = summed.reshape(*pieces, *summed.shape[1:]).sum(axis=1)
        return Sums(maximum, total + read_twice(flat_values, never, 0.0), summed)

    def take_edges(trip: jax.Array, sums: Sums) -> Sums:
        base = trip * num_segments
        rank = base + segments
        last = work.last[rank]
        columns = last[:, None]
        is_edge = jnp.ones_like(columns, bool)
        if window is not None:
            first = work.first[rank] - 1
            columns = jnp.stack([first, last], axis=1)
            is_edge = jnp.stack([first < last, first <= last], axis=1)
        offsets = jnp.arange(block_size, dtype=jnp.int32)
        tokens = columns[..., None] * block_size + offsets[None, None]
        context = requests.context_lengths[work.request[rank]][:, None, None]
        visible = is_edge[..., None] & (tokens < context)
        if window is not None:
            visible &= tokens >= context - window
        found = attend(rank, columns, visible, trip < 0, mask_values=True)
        return _update(sums, base, join_sums(_slice(sums, base, num_segments), found))

    def take_pieces(trip: jax.Array, sums: Sums) -> Sums:
        index = trip * num_lanes + lanes
        live = index < work.num_pieces
        # Lanes without work repeat the last piece, whose contents are sound.
        index = jnp.minimum(index, work.num_pieces - 1)
        rank = jnp.sum(work.ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
        before = jnp.where(rank > 0, work.ends[rank - 1], 0)
        columns = (work.first[rank] + (index - before) * piece_blocks)[:, None]
        columns = columns + jnp.arange(piece_blocks, dtype=jnp.int32)[None]
        last = work.last[rank][:, None]
        visible = jnp.broadcast_to(
            (columns < last)[..., None], (*columns.shape, block_size)
        )
        columns = jnp.minimum(columns, last - 1)
        found = attend(rank, columns, visible, trip < 0, mask_values=False)
        base = rank[0]
        owns = live[None, :] & (rank[None, :] - base == segments[:, None])
        old = _slice(sums, base, num_segments)
        return _update(sums, base, _join_lanes(old, found, owns, rank - base))

    shape = (num_requests + num_lanes, *queries.shape[1:3])
    sums = empty_sums(shape, value_dim, None if sinks is None else sinks[None])
    zero = jnp.int32(0)
    num_trips = (work.num_requests + num_segments - 1) // num_segments
    sums = lax.fori_loop(zero, num_trips, take_edges, sums)
    num_trips = (work.num_pieces + num_lanes - 1) // num_lanes
    sums = lax.fori_loop(zero, num_trips, take_pieces, sums)

    # Back from ranks to rows; a row without a listed request sees nothing.
    rank = jnp.full(num_rows, -1, jnp.int32)
    starts = jnp.where(work.rank < num_requests, requests.query_starts, num_rows)
    rank = rank.at[starts].set(work.rank, mode="drop")
    return finish_sums(
        Sums(*(array[rank] for array in sums)), (rank >= 0)[:, None, None]
    )


def _scales(
    pools: Pools, layer: jax.Array, blocks: jax.Array
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the scales of the blocks' keys and values, f32[C, K, T] if there are."""
    keys, values = (
        None if scales is None else gather_scales(scales, layer, blocks)
        for scales in (pools.key_scales, pools.value_scales)
    )
    return keys, keys if pools.values is None else values


def list_work(
    requests: Requests,
    window: jax.Array | None,
    block_size: int,
    *,
    piece_blocks: int,
    padding: int,
) -> WorkList:
    """Rank the requests of one row and count the pieces between their edges."""
    context = requests.context_lengths
    listed = (requests.query_lengths == 1) & (context > 0)
    last = jnp.maximum(context - 1, 0) // block_size
    first = jnp.zeros_like(last)
    if window is not None:
        listed &= window > 0
        first = jnp.maximum(context - window, 0) // block_size + 1
    counts = jnp.maximum(last - first + piece_blocks - 1, 0) // piece_blocks
    counts = jnp.where(listed, counts, 0)

    # Requests without pieces go last, or a trip would skip ranks.
    num_requests = context.shape[0]
    has_pieces = counts > 0
    long_rank = jnp.cumsum(has_pieces, dtype=jnp.int32)
    short_rank = long_rank[-1] + jnp.cumsum(listed & ~has_pieces, dtype=jnp.int32)
    rank = jnp.where(has_pieces, long_rank, short_rank) - 1
    size = num_requests + padding
    rank = jnp.where(listed, rank, size)
    request = jnp.zeros(size, jnp.int32)
    request = request.at[rank].set(
        jnp.arange(num_requests, dtype=jnp.int32), mode="drop", unique_indices=True
    )
    is_rank = jnp.arange(size, dtype=jnp.int32) < short_rank[-1]
    ends = jnp.cumsum(jnp.where(is_rank, counts[request], 0), dtype=jnp.int32)
    return WorkList(
        request=request,
        first=first[request],
        last=last[request],
        ends=ends,
        rank=rank,
        num_requests=short_rank[-1],
        num_pieces=ends[-1],
    )


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
    lane_shrink = jnp.exp(found.maximum - maximum[segment])
    joins = owns.astype(jnp.float32)
    total = jnp.einsum(
        "mp,pkg->mkg", joins, found.total * lane_shrink, precision="highest"
    )
    values = jnp.einsum(
        "mp,pkgd->mkgd",
        joins,
        found.values * lane_shrink[..., None],
        precision="highest",
    )
    return Sums(
        maximum,
        old.total * shrink + total,
        old.values * shrink[..., None] + values,
    )


def _slice(sums: Sums, base: jax.Array, size: int) -> Sums:
    return Sums(*(lax.dynamic_slice_in_dim(array, base, size) for array in sums))


def _update(sums: Sums, base: jax.Array, part: Sums) -> Sums:
    return Sums(
        *(
            lax.dynamic_update_slice_in_dim(array, new, base, 0)
            for array, new in zip(sums, part, strict=True)
        )
    )
