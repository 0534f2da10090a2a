"""Attention whose bits depend on a row's position alone, not on what is beside it.

The sums of floats depend on their order. Here a context is added up in pieces that are
cut at multiples of a fixed number of tokens and joined from the first to the last, for
a row of a prompt and for a single row in the same way: tiles of `Q` rows of one
request, `P` of which go through their contexts side by side. So all products have one
shape whatever a step consists of, and what a row gets depends on its own context alone
(as `jkv.generate(exact=)` promises). Why shapes must not vary: Horace He and Thinking
Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025.

Tiles are taken in the order of their pieces, the most first, so that those side by side
have much the same to do.

Symbols: `R` rows, `P` lanes, `Q` rows of a tile, `S` tokens of a piece.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.attention.call import Call
from jkv.attention.xla.contexts import attend_contexts, find_pieces
from jkv.attention.xla.operations import divide_up
from jkv.attention.xla.plain_path import attend_by_head
from jkv.attention.xla.row_tiles import RowTiles, cut_rows, take_rows
from jkv.sharding.loops import fori_loop

# Tokens of a piece, or a block if that has more.
_PIECE_TOKENS = 64

# Rows of a tile: a single row costs the products of all of them.
_TILE_ROWS = 4

# Keys (or values) gathered in one trip, in float32, as `decode.TRIP_BYTES`.
_TRIP_BYTES = 2 * 2**20
_MAX_LANES = 64


class _Walk(NamedTuple):
    """What every trip reads, and how much it takes."""

    call: Call
    queries: jax.Array  # f32[R, K, G, D], scaled
    tiles: RowTiles
    order: jax.Array  # i32[tiles], the longest first
    num_lanes: int  # P
    columns: int  # blocks of a piece


def attend_by_position(call: Call) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the output's dtype and the log-sum-exp, f32[R, H]."""
    return attend_by_head(call, _attend_tiles)


def _attend_tiles(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
) -> tuple[jax.Array, jax.Array]:
    """Go through all tiles; return `f32[R, K, G, Dv]` and `f32[R, K, G]`."""
    walk = _plan_walk(call, queries)
    num_tiles = walk.order.shape[0]
    shape = num_tiles, queries.shape[1], _TILE_ROWS * call.heads_per_kv
    Results = tuple[jax.Array, jax.Array]

    def take(trip: jax.Array, results: Results) -> Results:
        base = trip * walk.num_lanes
        index = lax.dynamic_slice_in_dim(walk.order, base, walk.num_lanes)
        rows, readers = walk.tiles.locate(index)
        rows = take_rows(walk.queries, rows)
        found = attend_contexts(call, rows, readers, walk.columns)
        output, lse = (
            old.at[index].set(new, unique_indices=True)
            for old, new in zip(results, found, strict=True)
        )
        return output, lse

    results = (
        jnp.zeros((*shape, call.pools.value_dim), jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )
    num_trips = divide_up(walk.tiles.ends[-1], walk.num_lanes)
    return walk.tiles.to_rows(fori_loop(jnp.int32(0), num_trips, take, results))


def _plan_walk(call: Call, queries: jax.Array) -> _Walk:
    """Choose how much a trip takes, by sizes that no step changes, and order tiles."""
    pools = call.pools
    columns = max(1, _PIECE_TOKENS // pools.block_size)
    head_dim = max(queries.shape[3], pools.value_dim)
    piece_bytes = 4 * columns * pools.block_size * pools.num_kv_heads * head_dim
    tiles = cut_rows(call, _TILE_ROWS)
    num_lanes = max(1, min(_TRIP_BYTES // piece_bytes, _MAX_LANES, tiles.most))
    num_tiles = -(-tiles.most // num_lanes) * num_lanes
    index = jnp.arange(num_tiles, dtype=jnp.int32)
    readers = tiles.locate(index)[1]
    first, last = find_pieces(call, readers, columns)
    counts = last - first
    # How many come before each, of a few hundred at most: cheaper than to sort.
    is_before = (counts[None] > counts[:, None]) | (
        (counts[None] == counts[:, None]) & (index[None] < index[:, None])
    )
    rank = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    order = jnp.zeros_like(index).at[rank].set(index, unique_indices=True)
    return _Walk(call, queries, tiles, order, num_lanes, columns)
