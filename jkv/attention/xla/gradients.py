"""The derivative, of whichever implementation: tiles of rows and chunks of blocks
again, nothing kept but the result and its log-sum-exp.

As in FlashAttention (arXiv 2205.14135, appendix B) the weights are computed anew from
the scores. Gradients with respect to the pools are summed in float32 arrays of the
pools' shape: a block that several sequences share collects from all of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Constants, Requests
from jkv.attention.pools import ONE_BYTE_DTYPES, Pools, add_blocks
from jkv.attention.xla.tiling import (
    gather_heads,
    locate_chunk,
    locate_tile,
    make_tiling,
    score_chunk,
)


class Gradients(NamedTuple):
    """Cotangents; those of the pools are None unless they hold whole floats."""

    queries: jax.Array  # f32[R, K, G, D]
    keys: jax.Array | None  # f32[L, N, K, T, D]
    values: jax.Array | None  # f32[L, N, K, T, Dv], None also if they lie in the keys


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    attend: Callable[..., tuple[jax.Array, jax.Array]],
    constants: Constants,
    queries: jax.Array,  # [R, H, D], not scaled
    pools: Pools,
    scale: jax.Array,  # f32[]
    sinks: jax.Array | None,  # f32[H]
    layer: jax.Array,  # i32[]
    requests: Requests,
    window: jax.Array | None,  # i32[]
) -> tuple[jax.Array, jax.Array]:
    """Call an implementation, which need not be differentiable itself.

    Returns:
      What it returns: [R, H, Dv] in the queries' dtype and f32[R, H].
    """
    return attend(
        queries,
        pools,
        layer,
        requests,
        scale=scale,
        window=window,
        constants=constants,
        sinks=sinks,
    )


# Jitted, so that an eager backward pass is too.
attend_differentiably = jax.jit(_attend, static_argnums=(0, 1))


def _forward(attend, constants, *operands):  # type: ignore[no-untyped-def]
    output, lse = _attend(attend, constants, *operands)
    return (output, lse), (operands, output, lse)


def _backward(attend, constants, saved, cotangents):  # type: ignore[no-untyped-def]
    del attend
    operands, output, lse = saved
    queries, pools, scale, sinks, layer, requests, window = operands
    num_rows, num_heads, head_dim = queries.shape
    by_group = (num_rows, pools.num_kv_heads, num_heads // pools.num_kv_heads)
    d_output = cotangents[0].astype(jnp.float32)
    # d score = weight * (d weight - delta), summed over what the softmax couples.
    delta = jnp.sum(d_output * output.astype(jnp.float32), axis=-1) - cotangents[1]
    plain_queries = queries.astype(jnp.float32)
    grads = attend_backward(
        (plain_queries * scale).reshape(*by_group, head_dim),
        pools,
        layer,
        requests,
        lse.reshape(by_group),
        d_output.reshape(*by_group, -1),
        delta.reshape(by_group),
        window=window,
        soft_cap=constants.soft_cap,
    )
    d_scaled = grads.queries.reshape(queries.shape)
    d_keys, d_values = (
        None if grad is None or pool is None else grad.astype(pool.dtype)
        for grad, pool in ((grads.keys, pools.keys), (grads.values, pools.values))
    )
    d_sinks = None
    if sinks is not None:
        # A sink is a token with the value zero. Rows that see nothing have none.
        weight = jnp.exp(sinks[None] - jnp.where(jnp.isneginf(lse), jnp.inf, lse))
        d_sinks = -jnp.sum(weight * delta, axis=0)
    return (
        (d_scaled * scale).astype(queries.dtype),
        dataclasses.replace(
            pools, keys=d_keys, values=d_values, key_scales=None, value_scales=None
        ),
        jnp.sum(d_scaled * plain_queries),
        d_sinks,
        None,
        None,
        None,
    )


_attend.defvjp(_forward, _backward)


def attend_backward(
    queries: jax.Array,  # f32[R, K, G, D], scaled
    pools: Pools,
    layer: jax.Array,  # i32[]
    requests: Requests,
    lse: jax.Array,  # f32[R, K, G]
    d_output: jax.Array,  # f32[R, K, G, Dv]
    delta: jax.Array,  # f32[R, K, G], sum(d_output * output) - d_lse
    *,
    window: jax.Array | None,  # i32[]
    soft_cap: float | None,
) -> Gradients:
    """Return the cotangents of the queries and, for float pools, of the pools."""
    num_rows, block_size = queries.shape[0], pools.block_size
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
            keys, values = gather_heads(pools, layer, blocks)
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

            d_key_pool, d_value_pool = grads.keys, grads.values
            if d_key_pool is not None:
                d_keys = _dot("kgqs,kgqd->ksd", d_scores, rows)
                if pools.values is None:
                    d_values = _dot("kgqs,kgqd->ksd", weights, d_rows)
                    d_keys = d_keys.at[..., : pools.value_dim].add(d_values)
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

    def empty(pool: jax.Array | None) -> jax.Array | None:
        if pool is None or not jnp.issubdtype(pool.dtype, jnp.floating):
            return None
        if pool.dtype in ONE_BYTE_DTYPES:
            return None
        return jnp.zeros(pool.shape, jnp.float32)

    grads = Gradients(jnp.zeros_like(queries), empty(pools.keys), empty(pools.values))
    return lax.fori_loop(jnp.int32(0), tiling.ends[-1], backward_tile, grads)


def _dot(equation: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(equation, one, other, precision=lax.Precision.HIGHEST)
