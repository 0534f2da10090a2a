"""Rows of requests that bring several tokens at once: tiles of rows, chunks of blocks.

The outer loop walks the query tiles of all such requests, the inner one the chunks of
blocks that some row of the tile can see, with the online softmax of FlashAttention
(arXiv 2205.14135). Both trip counts are traced: what the causal mask or the window
hides as a whole is never read, and a call without such requests makes no trip.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Call
from jkv.attention.softmax import Sums, empty_sums, finish_sums
from jkv.attention.xla.lanes import multiply, set_broken_apart
from jkv.attention.xla.tiling import (
    RowTile,
    Tiling,
    gather_heads,
    locate_chunk,
    locate_tile,
    make_tiling,
    score_chunk,
)
from jkv.sharding.loops import fori_loop


def attend_prefill(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
    output: jax.Array,  # f32[R, K, G, Dv]
    lse: jax.Array,  # f32[R, K, G]
) -> tuple[jax.Array, jax.Array]:
    """Fill in the rows of all requests with more than one row, leave the others."""
    tiling = make_tiling(call, min_rows=2)

    def fill_tile(
        index: jax.Array, results: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        tile = locate_tile(tiling, index)
        found = attend_tile(tiling, tile, queries)
        return _fill_in(results[0], found[0], tile), _fill_in(
            results[1], found[1], tile
        )

    return fori_loop(jnp.int32(0), tiling.ends[-1], fill_tile, (output, lse))


def attend_tile(
    tiling: Tiling,
    tile: RowTile,
    queries: jax.Array,  # f32[R, K, G, D], scaled
) -> tuple[jax.Array, jax.Array]:
    """Return f32[Q, K, G, Dv] and f32[Q, K, G] of the tile's rows."""
    call = tiling.call
    rows = lax.dynamic_slice_in_dim(queries, tile.start, tiling.tile_rows)
    rows = jnp.moveaxis(rows, 0, 2)  # f32[K, G, Q, D]
    sinks = None
    if call.sinks is not None:
        sinks = call.sinks.reshape(call.pools.num_kv_heads, call.heads_per_kv, 1)
    sums = empty_sums(rows.shape[:3], call.pools.value_dim, sinks)
    attend = functools.partial(_attend_chunk, tiling, tile, rows)
    sums = fori_loop(jnp.int32(0), tile.num_chunks, attend, sums)
    sees = tile.valid & (tile.last >= 0)
    if tile.before is not None:
        sees &= tile.last > tile.before
    by_row = Sums(*(jnp.moveaxis(array, 2, 0) for array in sums))
    return finish_sums(by_row, sees[:, None, None])


def _attend_chunk(
    tiling: Tiling,
    tile: RowTile,
    rows: jax.Array,  # f32[K, G, Q, D], scaled
    index: jax.Array,  # i32[]
    sums: Sums,  # f32[K, G, Q, ...]
) -> Sums:
    """Add the tokens of one chunk to the rows' sums."""
    call = tiling.call
    chunk = locate_chunk(tiling, tile, index)
    keys, values = gather_heads(call.pools, call.layer, chunk.blocks)
    values, marks = set_broken_apart(values, chunk.used[None, :, None])
    scores = score_chunk(rows, keys, chunk.visible, call.soft_cap, marks)
    maximum = jnp.maximum(sums.maximum, scores.max(axis=3))
    weights = jnp.exp(scores - maximum[..., None])
    shrink = jnp.exp(sums.maximum - maximum)
    summed = multiply("kgqs,ksd->kgqd", weights, values)
    return Sums(
        maximum,
        sums.total * shrink + weights.sum(axis=3),
        sums.values * shrink[..., None] + summed,
    )


def _fill_in(results: jax.Array, found: jax.Array, tile: RowTile) -> jax.Array:
    """Replace the tile's rows; those of other tiles and requests stay as they were."""
    old = lax.dynamic_slice_in_dim(results, tile.start, found.shape[0])
    is_mine = tile.valid.reshape(-1, *(1,) * (found.ndim - 1))
    found = jnp.where(is_mine, found, old)
    return lax.dynamic_update_slice_in_dim(results, found, tile.start, 0)
