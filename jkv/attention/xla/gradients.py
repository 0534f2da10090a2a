"""The derivative without a kernel: tiles of rows and chunks of blocks again.

Gradients with respect to the pools are summed in float32 arrays of the pools' shape: a
block that several sequences share collects from all of them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.backend import Cotangents, Gradients, shape_gradients
from jkv.attention.call import Call
from jkv.attention.xla.lanes import multiply, scale_queries, set_broken_apart
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


class RowOperands(NamedTuple):
    """What the backward pass reads of each row: [R, K, G, ...], of a tile [K, G, Q]."""

    queries: jax.Array  # f32[..., D], scaled
    lse: jax.Array  # f32[...], finite
    d_output: jax.Array  # f32[..., Dv]
    delta: jax.Array  # f32[...]
    marks: jax.Array  # f32[...], NaN for a row with a broken number in it, else 0


class Sums(NamedTuple):
    """Sums so far, in float32; those of the pools None if they have no gradient."""

    queries: jax.Array  # f32[R, K, G, D], of the scaled queries; of a tile's in a tile
    keys: jax.Array | None  # f32[L, N, K, T, D]
    values: jax.Array | None  # f32[L, N, K, T, Dv]


def differentiate_plainly(call: Call, cotangents: Cotangents) -> Gradients:
    """Return the cotangents of the queries and, for float pools, of the pools."""
    queries = scale_queries(call)
    by_group = queries.shape[:3]
    d_output, lse, delta = cotangents
    d_output = d_output.astype(jnp.float32).reshape(*by_group, -1)
    clean_queries, query_marks = set_broken_apart(queries, jnp.bool_(True))
    d_output, output_marks = set_broken_apart(d_output, jnp.bool_(True))
    rows = RowOperands(
        queries=clean_queries,
        # Rows that see nothing have weights of zero whatever their log-sum-exp.
        lse=jnp.where(jnp.isneginf(lse), 0.0, lse).reshape(by_group),
        d_output=d_output,
        delta=delta.reshape(by_group),
        marks=query_marks + output_marks,
    )
    shapes = shape_gradients(call)
    tiling = make_tiling(call, min_rows=1)

    def add_tile(index: jax.Array, sums: Sums) -> Sums:
        return _add_tile(tiling, locate_tile(tiling, index), rows, sums)

    def start(shape: jax.Array | None) -> jax.Array | None:
        return None if shape is None else jnp.zeros(shape.shape, jnp.float32)

    sums = Sums(jnp.zeros_like(queries), start(shapes.keys), start(shapes.values))
    sums = fori_loop(jnp.int32(0), tiling.ends[-1], add_tile, sums)
    return Gradients(
        sums.queries.reshape(call.queries.shape),
        _cast_like(sums.keys, call.pools.keys),
        _cast_like(sums.values, call.pools.values),
    )


def _cast_like(sums: jax.Array | None, pool: jax.Array | None) -> jax.Array | None:
    return None if sums is None or pool is None else sums.astype(pool.dtype)


def _add_tile(tiling: Tiling, tile: RowTile, rows: RowOperands, sums: Sums) -> Sums:
    """Add what the rows of one tile bring."""
    tile_rows = RowOperands(
        *(
            jnp.moveaxis(
                lax.dynamic_slice_in_dim(array, tile.start, tiling.tile_rows), 0, 2
            )
            for array in rows
        )
    )
    add_chunk = functools.partial(_add_chunk, tiling, tile, tile_rows)
    tile_sums = sums._replace(queries=jnp.zeros_like(tile_rows.queries))
    tile_sums = fori_loop(jnp.int32(0), tile.num_chunks, add_chunk, tile_sums)
    # Rows of other tiles and requests get nothing.
    d_rows = jnp.moveaxis(tile_sums.queries, 2, 0)
    d_rows = jnp.where(tile.valid[:, None, None, None], d_rows, 0.0)
    old = lax.dynamic_slice_in_dim(sums.queries, tile.start, tiling.tile_rows)
    d_queries = lax.dynamic_update_slice_in_dim(
        sums.queries, old + d_rows, tile.start, 0
    )
    return tile_sums._replace(queries=d_queries)


def _add_chunk(
    tiling: Tiling, tile: RowTile, rows: RowOperands, index: jax.Array, sums: Sums
) -> Sums:
    """Add what one chunk of blocks brings, `sums.queries` of the tile's rows."""
    pools, layer, soft_cap = tiling.call.pools, tiling.call.layer, tiling.call.soft_cap
    blocks, visible, used = locate_chunk(tiling, tile, index)
    keys, values = gather_heads(pools, layer, blocks)
    used, seen = used[None, :, None], visible[None, None]
    keys, key_marks = set_broken_apart(keys, used)
    values, value_marks = set_broken_apart(values, used)
    marks = key_marks + value_marks
    scores = score_chunk(rows.queries, keys, visible, soft_cap, marks)
    weights = jnp.exp(scores + (rows.marks - rows.lse)[..., None])
    weights = jnp.where(seen, weights, 0.0)
    d_weights = multiply("kgqd,ksd->kgqs", rows.d_output, values)
    d_scores = weights * (d_weights - rows.delta[..., None])
    if soft_cap is not None:
        d_scores *= 1.0 - jnp.square(scores / soft_cap)
    # The other rows of a tile are of others, whose cotangents may be NaN.
    d_scores = jnp.where(seen, d_scores, 0.0)

    d_key_pool, d_value_pool = sums.keys, sums.values
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
    d_queries = sums.queries + multiply("kgqs,ksd->kgqd", d_scores, keys)
    return Sums(d_queries, d_key_pool, d_value_pool)


def _by_block(tiling: Tiling, tokens: jax.Array) -> jax.Array:
    """Turn `f32[K, C * T, D]` into `f32[C, K, T, D]`."""
    num_kv_heads, _, head_dim = tokens.shape
    block_size = tiling.call.pools.block_size
    heads = tokens.reshape(num_kv_heads, -1, block_size, head_dim)
    return jnp.swapaxes(heads, 0, 1)


def add_blocks(
    pool: jax.Array,  # f32[L, N, K, T, D]
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[C], ids out of range are dropped
    chunk: jax.Array,  # f32[C, K, T, D]
) -> jax.Array:
    """Add a chunk back to where its blocks are in a layer."""
    # A negative index would wrap even with mode="drop".
    blocks = jnp.where(blocks < 0, pool.shape[1], blocks)
    return pool.at[layer, blocks].add(chunk, mode="drop")
