"""The backward pass: tiles of rows and chunks of blocks again, nothing kept but the
log-sum-exp.

As in FlashAttention (arXiv 2205.14135, appendix B) the weights are computed anew from
the scores. Gradients with respect to the pools are summed in float32 arrays of the
pools' shape: a block that several sequences share collects from all of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.prefill import (
    gather_heads,
    locate_chunk,
    locate_tile,
    make_tiling,
    score_chunk,
)
from jkv.attention.requests import Requests
from jkv.attention.storage import add_blocks


class Gradients(NamedTuple):
    """Cotangents; those of the pools are None when the pools hold raw bits."""

    queries: jax.Array  # f32[R, K, G, D]
    key_pool: jax.Array | None  # f32[L, N, K, T, D]
    value_pool: jax.Array | None  # f32[L, N, K, T, Dv]


def attend_backward(
    queries: jax.Array,  # f32[R, K, G, D], scaled
    key_pool: jax.Array,  # [L, N, K, T, D]
    value_pool: jax.Array,  # [L, N, K, T, Dv]
    layer: jax.Array,  # i32[]
    requests: Requests,
    lse: jax.Array,  # f32[R, K, G]
    d_output: jax.Array,  # f32[R, K, G, Dv]
    delta: jax.Array,  # f32[R, K, G], sum(d_output * output) - d_lse
    *,
    window: jax.Array | None,  # i32[]
    soft_cap: float | None,
    kv_dtype: jax.typing.DTypeLike | None,
) -> Gradients:
    """Return the cotangents of the queries and, for float pools, of the pools."""
    num_rows, block_size = queries.shape[0], key_pool.shape[3]
    tiling = make_tiling(requests, num_rows=num_rows, block_size=block_size, min_rows=1)
    tile_rows = tiling.tile_rows
    # Rows that see nothing have weights of zero whatever their log-sum-exp.
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)

    def backward_tile(index: jax.Array, grads: Gradients) -> Gradients:
        tile = locate_tile(tiling, requests, window, block_size, index)
        rows, row_lse, d_rows, row_delta = (
            jnp.moveaxis(lax.dynamic_slice_in_dim(array, tile.start, tile_rows), 0, 2)
            for array in (queries, lse, d_output, delta)
        )  # f32[K, G, Q, ...]

        def backward_chunk(chunk: jax.Array, grads: Gradients) -> Gradients:
            blocks, visible, used = locate_chunk(
                tiling, tile, window, block_size, chunk
            )
            keys = gather_heads(key_pool, layer, blocks, kv_dtype)
            values = gather_heads(value_pool, layer, blocks, kv_dtype)
            # Slots that no row sees may hold NaN, and 0 * NaN is NaN.
            keys = jnp.where(used[None, :, None], keys, 0.0)
            values = jnp.where(used[None, :, None], values, 0.0)
            scores = score_chunk(rows, keys, visible, soft_cap)
            weights = jnp.exp(scores - row_lse[..., None])
            weights = jnp.where(visible[None, None], weights, 0.0)
            d_scores = _dot("kgqd,ksd->kgqs", d_rows, values) - row_delta[..., None]
            d_scores = weights * d_scores
            if soft_cap is not None:
                slope = 1.0 - jnp.square(scores / soft_cap)
                d_scores = jnp.where(visible[None, None], d_scores * slope, 0.0)

            d_key_pool, d_value_pool = grads.key_pool, grads.value_pool
            if d_key_pool is not None:
                d_keys = _dot("kgqs,kgqd->ksd", d_scores, rows)
                d_key_pool = add_blocks(d_key_pool, layer, blocks, split(d_keys))
            if d_value_pool is not None:
                d_values = _dot("kgqs,kgqd->ksd", weights, d_rows)
                d_value_pool = add_blocks(d_value_pool, layer, blocks, split(d_values))
            d_queries = grads.queries + _dot("kgqs,ksd->kgqd", d_scores, keys)
            return Gradients(d_queries, d_key_pool, d_value_pool)

        tile_grads = grads._replace(queries=jnp.zeros_like(rows))
        tile_grads = lax.fori_loop(
            jnp.int32(0), tile.num_chunks, backward_chunk, tile_grads
        )
        # Rows of other tiles and requests get nothing.
        d_rows = jnp.moveaxis(tile_grads.queries, 2, 0)
        d_rows = jnp.where(tile.valid[:, None, None, None], d_rows, 0.0)
        old = lax.dynamic_slice_in_dim(grads.queries, tile.start, tile_rows)
        d_queries = lax.dynamic_update_slice_in_dim(
            grads.queries, old + d_rows, tile.start, 0
        )
        return tile_grads._replace(queries=d_queries)

    def split(tokens: jax.Array) -> jax.Array:
        """Turn `f32[K, C * T, D]` into `f32[C, K, T, D]`."""
        num_kv_heads, _, head_dim = tokens.shape
        heads = tokens.reshape(num_kv_heads, -1, block_size, head_dim)
        return jnp.swapaxes(heads, 0, 1)

    def empty(pool: jax.Array) -> jax.Array | None:
        is_float = jnp.issubdtype(pool.dtype, jnp.floating)
        return jnp.zeros(pool.shape, jnp.float32) if is_float else None

    grads = Gradients(jnp.zeros_like(queries), empty(key_pool), empty(value_pool))
    return lax.fori_loop(jnp.int32(0), tiling.ends[-1], backward_tile, grads)


def _dot(equation: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(equation, one, other, precision=lax.Precision.HIGHEST)
