"""The derivative, of whichever implementation: tiles of rows and chunks of blocks
again, nothing kept but the result and its log-sum-exp.

As in FlashAttention (arXiv 2205.14135, appendix B) the weights are computed anew from
the scores. Gradients with respect to the pools are summed in float32 arrays of the
pools' shape: a block that several sequences share collects from all of them.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Attend, Call
from jkv.attention.elements import ONE_BYTE_DTYPES
from jkv.attention.pools import add_blocks
from jkv.attention.xla.operations import multiply
from jkv.attention.xla.plain_path import scale_queries
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
from jkv.sharding.varying import is_manual, vary_over, varying_axes


class Gradients(NamedTuple):
    """Cotangents; those of the pools are None unless they hold whole floats."""

    queries: jax.Array  # f32[R, K, G, D], of the scaled queries; of a tile's in a tile
    keys: jax.Array | None  # f32[L, N, K, T, D]
    values: jax.Array | None  # f32[L, N, K, T, Dv], None also if they lie in the keys


class Rows(NamedTuple):
    """What the backward pass reads of each row: [R, K, G, ...], of a tile [K, G, Q]."""

    queries: jax.Array  # f32[..., D], scaled
    lse: jax.Array  # f32[...], finite
    d_output: jax.Array  # f32[..., Dv]
    # d score = weight * (d weight - delta): what the softmax couples, summed up.
    delta: jax.Array  # f32[...], sum(d_output * output) - d_lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(attend: Attend, call: Call) -> tuple[jax.Array, jax.Array]:
    """Call an implementation, which need not be differentiable itself."""
    return attend(call)


@functools.partial(jax.jit, static_argnums=0)
def attend_differentiably(attend: Attend, call: Call) -> tuple[jax.Array, jax.Array]:
    """Call an implementation with the derivative of this file.

    Jitted, so that calls of equal shapes, dtypes and static fields are traced and
    lowered once, and an eager backward pass is compiled. Inside `shard_map` a gradient
    varies over all axes that anything here varies over, so the arguments do too: what
    was the same on several devices has its gradient summed over them.
    """
    return _attend(attend, vary_over(call, varying_axes(call)) if is_manual() else call)


def _forward(attend, call):  # type: ignore[no-untyped-def]
    output, lse = attend(call)
    return (output, lse), (call, output, lse)


def _backward(attend, saved, cotangents):  # type: ignore[no-untyped-def]
    del attend
    call, output, lse = saved
    queries = scale_queries(call)
    d_output = cotangents[0].astype(jnp.float32)
    delta = jnp.sum(d_output * output.astype(jnp.float32), axis=-1) - cotangents[1]
    by_group = queries.shape[:3]
    rows = Rows(
        queries=queries,
        # Rows that see nothing have weights of zero whatever their log-sum-exp.
        lse=jnp.where(jnp.isneginf(lse), 0.0, lse).reshape(by_group),
        d_output=d_output.reshape(*by_group, -1),
        delta=delta.reshape(by_group),
    )
    grads = attend_backward(call, rows)
    d_scaled = grads.queries.reshape(call.queries.shape)
    # None stands for what has no gradient: integers, raw bits, scales of tokens.
    gradient = dataclasses.replace(
        call,
        queries=(d_scaled * call.scale).astype(call.queries.dtype),
        pools=dataclasses.replace(
            call.pools,
            keys=_cast_like(grads.keys, call.pools.keys),
            values=_cast_like(grads.values, call.pools.values),
            key_scales=None,
            value_scales=None,
        ),
        scale=jnp.sum(d_scaled * call.queries.astype(jnp.float32)),
        sinks=_differentiate_sinks(call.sinks, lse, delta),
        layer=None,
        requests=None,
        window=None,
        part=None,
    )
    return (gradient,)


_attend.defvjp(_forward, _backward)


def _cast_like(grad: jax.Array | None, pool: jax.Array | None) -> jax.Array | None:
    return None if grad is None or pool is None else grad.astype(pool.dtype)


def _differentiate_sinks(
    sinks: jax.Array | None,  # f32[H]
    lse: jax.Array,  # f32[R, H]
    delta: jax.Array,  # f32[R, H]
) -> jax.Array | None:
    """A sink is a token with the value zero. Rows that see nothing have none."""
    if sinks is None:
        return None
    weight = jnp.exp(sinks[None] - jnp.where(jnp.isneginf(lse), jnp.inf, lse))
    return -jnp.sum(weight * delta, axis=0)


def attend_backward(call: Call, rows: Rows) -> Gradients:
    """Return the cotangents of the queries and, for float pools, of the pools."""
    tiling = make_tiling(call, min_rows=1)

    def add_tile(index: jax.Array, grads: Gradients) -> Gradients:
        return _add_tile(tiling, locate_tile(tiling, index), rows, grads)

    pools = call.pools
    grads = Gradients(
        jnp.zeros_like(rows.queries),
        _empty_gradient(pools.keys),
        _empty_gradient(pools.values),
    )
    return fori_loop(jnp.int32(0), tiling.ends[-1], add_tile, grads)


def _empty_gradient(pool: jax.Array | None) -> jax.Array | None:
    """Return zeros for pools of whole floats, None for what has no gradient."""
    if pool is None or not jnp.issubdtype(pool.dtype, jnp.floating):
        return None
    if pool.dtype in ONE_BYTE_DTYPES:
        return None
    return jnp.zeros(pool.shape, jnp.float32)


def _add_tile(tiling: Tiling, tile: RowTile, rows: Rows, grads: Gradients) -> Gradients:
    """Add what the rows of one tile bring."""
    tile_rows = Rows(
        *(
            jnp.moveaxis(
                lax.dynamic_slice_in_dim(array, tile.start, tiling.tile_rows), 0, 2
            )
            for array in rows
        )
    )
    add_chunk = functools.partial(_add_chunk, tiling, tile, tile_rows)
    tile_grads = grads._replace(queries=jnp.zeros_like(tile_rows.queries))
    tile_grads = fori_loop(jnp.int32(0), tile.num_chunks, add_chunk, tile_grads)
    # Rows of other tiles and requests get nothing.
    d_rows = jnp.moveaxis(tile_grads.queries, 2, 0)
    d_rows = jnp.where(tile.valid[:, None, None, None], d_rows, 0.0)
    old = lax.dynamic_slice_in_dim(grads.queries, tile.start, tiling.tile_rows)
    d_queries = lax.dynamic_update_slice_in_dim(
        grads.queries, old + d_rows, tile.start, 0
    )
    return tile_grads._replace(queries=d_queries)


def _add_chunk(
    tiling: Tiling, tile: RowTile, rows: Rows, index: jax.Array, grads: Gradients
) -> Gradients:
    """Add what one chunk of blocks brings, `grads.queries` of the tile's rows."""
    pools, layer, soft_cap = tiling.call.pools, tiling.call.layer, tiling.call.soft_cap
    blocks, visible, used = locate_chunk(tiling, tile, index)
    keys, values = gather_heads(pools, layer, blocks)
    # Slots that no row sees may hold NaN, and 0 * NaN is NaN.
    keys = jnp.where(used[None, :, None], keys, 0.0)
    values = jnp.where(used[None, :, None], values, 0.0)
    scores = score_chunk(rows.queries, keys, visible, soft_cap)
    weights = jnp.exp(scores - rows.lse[..., None])
    weights = jnp.where(visible[None, None], weights, 0.0)
    d_weights = multiply("kgqd,ksd->kgqs", rows.d_output, values)
    d_scores = weights * (d_weights - rows.delta[..., None])
    if soft_cap is not None:
        slope = 1.0 - jnp.square(scores / soft_cap)
        d_scores = jnp.where(visible[None, None], d_scores * slope, 0.0)

    d_key_pool, d_value_pool = grads.keys, grads.values
    if d_key_pool is not None:
        d_keys = multiply("kgqs,kgqd->ksd", d_scores, rows.queries)
        if pools.values is None:
            d_values = multiply("kgqs,kgqd->ksd", weights, rows.d_output)
            d_keys = d_keys.at[..., : pools.value_dim].add(d_values)
        d_key_pool = add_blocks(d_key_pool, layer, blocks, _by_block(tiling, d_keys))
    if d_value_pool is not None:
        d_values = multiply("kgqs,kgqd->ksd", weights, rows.d_output)
        d_values = _by_block(tiling, d_values)
        d_value_pool = add_blocks(d_value_pool, layer, blocks, d_values)
    d_queries = grads.queries + multiply("kgqs,ksd->kgqd", d_scores, keys)
    return Gradients(d_queries, d_key_pool, d_value_pool)


def _by_block(tiling: Tiling, tokens: jax.Array) -> jax.Array:
    """Turn `f32[K, C * T, D]` into `f32[C, K, T, D]`."""
    num_kv_heads, _, head_dim = tokens.shape
    block_size = tiling.call.pools.block_size
    heads = tokens.reshape(num_kv_heads, -1, block_size, head_dim)
    return jnp.swapaxes(heads, 0, 1)
