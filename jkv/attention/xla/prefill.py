"""Rows of requests that bring several tokens at once: tiles of rows, chunks of blocks.

The outer loop walks the query tiles of all such requests, the inner one the chunks of
blocks that some row of the tile can see, with the online softmax of FlashAttention
(arXiv 2205.14135). Both trip counts are traced: what the causal mask or the window
hides as a whole is never read, and a call without such requests makes no trip.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Requests
from jkv.attention.pools import Pools
from jkv.attention.softmax import Sums, empty_sums, finish_sums
from jkv.attention.xla.tiling import (
    gather_heads,
    locate_chunk,
    locate_tile,
    make_tiling,
    score_chunk,
)


def attend_prefill(
    queries: jax.Array,  # f32[R, K, G, D], scaled
    pools: Pools,
    layer: jax.Array,  # i32[]
    requests: Requests,
    output: jax.Array,  # f32[R, K, G, Dv]
    lse: jax.Array,  # f32[R, K, G]
    *,
    window: jax.Array | None,  # i32[]
    soft_cap: float | None,
    sinks: jax.Array | None,  # f32[K, G]
) -> tuple[jax.Array, jax.Array]:
    """Fill in the rows of all requests with more than one row, leave the others."""
    num_rows, num_kv_heads, group, _ = queries.shape
    block_size = pools.block_size
    tiling = make_tiling(requests, num_rows=num_rows, block_size=block_size, min_rows=2)
    tile_rows = tiling.tile_rows

    def attend_tile(
        index: jax.Array, results: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        tile = locate_tile(tiling, requests, window, block_size, index)
        rows = lax.dynamic_slice_in_dim(queries, tile.start, tile_rows)
        rows = jnp.moveaxis(rows, 0, 2)  # f32[K, G, Q, D]

        def attend_chunk(chunk: jax.Array, sums: Sums) -> Sums:
            blocks, visible, used = locate_chunk(
                tiling, tile, window, block_size, chunk
            )
            keys, values = gather_heads(pools, layer, blocks)
            # Slots that no row sees may hold NaN, and 0 * NaN is NaN.
            values = jnp.where(used[None, :, None], values, 0.0)
            scores = score_chunk(rows, keys, visible, soft_cap)
            maximum = jnp.maximum(sums.maximum, scores.max(axis=3))
            weights = jnp.exp(scores - maximum[..., None])
            shrink = jnp.exp(sums.maximum - maximum)
            summed = jnp.einsum(
                "kgqs,ksd->kgqd", weights, values, precision=lax.Precision.HIGHEST
            )
            return Sums(
                maximum,
                sums.total * shrink + weights.sum(axis=3),
                sums.values * shrink[..., None] + summed,
            )

        sums = empty_sums(
            (num_kv_heads, group, tile_rows),
            pools.value_dim,
            None if sinks is None else sinks[..., None],
        )
        sums = lax.fori_loop(jnp.int32(0), tile.num_chunks, attend_chunk, sums)
        sees = tile.valid & (tile.positions >= 0)
        if window is not None:
            sees &= window > 0
        tile_output, tile_lse = finish_sums(
            Sums(*(jnp.moveaxis(array, 2, 0) for array in sums)), sees[:, None, None]
        )
        # Rows of other tiles and requests stay as they were.
        output, lse = results
        mine = tile.valid[:, None, None]
        old_output = lax.dynamic_slice_in_dim(output, tile.start, tile_rows)
        old_lse = lax.dynamic_slice_in_dim(lse, tile.start, tile_rows)
        tile_output = jnp.where(mine[..., None], tile_output, old_output)
        tile_lse = jnp.where(mine, tile_lse, old_lse)
        return (
            lax.dynamic_update_slice_in_dim(output, tile_output, tile.start, 0),
            lax.dynamic_update_slice_in_dim(lse, tile_lse, tile.start, 0),
        )

    return lax.fori_loop(jnp.int32(0), tiling.ends[-1], attend_tile, (output, lse))
