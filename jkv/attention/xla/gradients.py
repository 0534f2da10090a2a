"""The derivative in plain XLA, by the tiles and pieces of the forward pass.

Gradients of the pools are summed in float32 arrays of the pools' shape, as several
sequences may share a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.attention.backend import Call, Cotangents, Gradients, shape_gradients
from jkv.attention.softmax import HIDDEN
from jkv.attention.xla.tiles import (
    Lanes,
    RowTiles,
    cap_scores,
    cut_prompts,
    find_blocks,
    find_lanes,
    find_pieces,
    gather_lanes,
    multiply,
    scale_queries,
    set_broken_apart,
)
from jkv.formats.format import multiply_out
from jkv.operations import fori_loop


class RowOperands(NamedTuple):
    """The operands per row: [R, K, G, ...], in a tile [K, Q * G, ...]."""

    queries: jax.Array  # f32[..., D], scaled
    lse: jax.Array  # f32[...], finite
    d_output: jax.Array  # f32[..., Dv]
    delta: jax.Array  # f32[...]
    marks: jax.Array  # f32[...], NaN for a row with a non-finite number, else 0


class Sums(NamedTuple):
    """Float32 gradient sums; None for pools without a gradient."""

    queries: jax.Array  # f32[R, K, G, D], of the scaled queries; or of one tile
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
        # Empty rows have weights of zero for any finite log-sum-exp.
        lse=jnp.where(jnp.isneginf(lse), 0.0, lse).reshape(by_group),
        d_output=d_output,
        delta=delta.reshape(by_group),
        marks=query_marks + output_marks,
    )
    shapes = shape_gradients(call)
    tiles, width = cut_prompts(call, min_rows=1)

    def add_tile(index: jax.Array, sums: Sums) -> Sums:
        return _add_tile(tiles, width, index, rows, sums)

    def start(shape: jax.Array | None) -> jax.Array | None:
        return None if shape is None else jnp.zeros(shape.shape, jnp.float32)

    sums = Sums(jnp.zeros_like(queries), start(shapes.keys), start(shapes.values))
    sums = fori_loop(jnp.int32(0), tiles.ends[-1], add_tile, sums)
    return Gradients(
        sums.queries.reshape(call.queries.shape),
        _cast_like(sums.keys, call.pools.keys),
        _cast_like(sums.values, call.pools.values),
    )


def _cast_like(sums: jax.Array | None, pool: jax.Array | None) -> jax.Array | None:
    return None if sums is None or pool is None else sums.astype(pool.dtype)


def _add_tile(
    tiles: RowTiles, width: int, index: jax.Array, rows: RowOperands, sums: Sums
) -> Sums:
    """Add the contributions of one tile's rows."""
    tile, readers = tiles.locate_slice(index)
    tile_rows = RowOperands(*map(tile.take, rows))
    first, end = find_pieces(tiles.call, readers, width)

    def add_piece(trip: jax.Array, sums: Sums) -> Sums:
        piece, never = first + trip, trip < 0
        lanes = find_lanes(tiles.call, readers, piece, width, never=never)
        return _add_piece(tiles.call, lanes, tile_rows, sums)

    tile_sums = sums._replace(queries=jnp.zeros_like(tile_rows.queries))
    tile_sums = fori_loop(jnp.int32(0), (end - first)[0], add_piece, tile_sums)
    return tile_sums._replace(queries=tile.put(sums.queries, tile_sums.queries))


def _add_piece(call: Call, lanes: Lanes, rows: RowOperands, sums: Sums) -> Sums:
    """Add the contributions of one piece; `sums.queries` is the tile's."""
    pools, soft_cap = call.pools, call.soft_cap
    visible = lanes.visible[0]  # bool[Q, S]
    gathered, used = gather_lanes(call, lanes), visible.any(axis=0)[None, :, None]
    keys, values = (
        multiply_out(tokens, factor)[0]
        for tokens, factor in (
            (gathered.keys, gathered.key_factor),
            (gathered.values, gathered.value_factor),
        )
    )
    keys, key_marks = set_broken_apart(keys, used)
    values, value_marks = set_broken_apart(values, used)
    marks = (key_marks + value_marks)[:, None]
    seen = jnp.repeat(visible, call.heads_per_kv, axis=0)[None]
    scores = cap_scores(multiply("kqd,ksd->kqs", rows.queries, keys), soft_cap)
    scores = jnp.where(seen, scores + marks, HIDDEN)
    weights = jnp.exp(scores + (rows.marks - rows.lse)[..., None])
    weights = jnp.where(seen, weights, 0.0)
    d_weights = multiply("kqd,ksd->kqs", rows.d_output, values)
    d_scores = weights * (d_weights - rows.delta[..., None])
    if soft_cap is not None:
        d_scores *= 1.0 - jnp.square(scores / soft_cap)
    # Rows of other requests in the tile may have NaN cotangents.
    d_scores = jnp.where(seen, d_scores, 0.0)

    blocks = find_blocks(call, lanes)[0]
    d_key_pool, d_value_pool = sums.keys, sums.values
    if d_key_pool is not None:
        d_keys = multiply("kqs,kqd->ksd", d_scores, rows.queries)
        if pools.values is None:
            d_values = multiply("kqs,kqd->ksd", weights, rows.d_output)
            d_keys = d_keys.at[..., : pools.value_dim].add(d_values)
        d_keys = _by_block(d_keys, pools.block_size)
        d_key_pool = add_blocks(d_key_pool, call.layer, blocks, d_keys)
    if d_value_pool is not None:
        d_values = multiply("kqs,kqd->ksd", weights, rows.d_output)
        d_values = _by_block(d_values, pools.block_size)
        d_value_pool = add_blocks(d_value_pool, call.layer, blocks, d_values)
    d_queries = sums.queries + multiply("kqs,ksd->kqd", d_scores, keys)
    return Sums(d_queries, d_key_pool, d_value_pool)


def _by_block(tokens: jax.Array, block_size: int) -> jax.Array:
    """Reshape f32[K, W * T, D] to f32[W, K, T, D]."""
    num_kv_heads, _, head_dim = tokens.shape
    heads = tokens.reshape(num_kv_heads, -1, block_size, head_dim)
    return jnp.swapaxes(heads, 0, 1)


def add_blocks(
    pool: jax.Array,  # f32[L, N, K, T, D]
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[W], out-of-range ids are dropped
    chunk: jax.Array,  # f32[W, K, T, D]
) -> jax.Array:
    """Add a chunk to its blocks of a layer."""
    # A negative index would wrap even with mode="drop".
    blocks = jnp.where(blocks < 0, pool.shape[1], blocks)
    return pool.at[layer, blocks].add(chunk, mode="drop")
