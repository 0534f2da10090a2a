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

import jax
import jax.numpy as jnp

from jkv.attention.call import Call
from jkv.attention.xla.contexts import RowTiles, attend_tiles, cut_rows, find_pieces
from jkv.attention.xla.plain_path import attend_by_head

# Tokens of a piece, or a block if that has more.
_PIECE_TOKENS = 64

# Rows of a tile: a single row costs the products of all of them.
_TILE_ROWS = 4

# Keys (or values) gathered in one trip, in float32, as `decode.TRIP_BYTES`.
_TRIP_BYTES = 2 * 2**20
_MAX_LANES = 64


def attend_by_position(call: Call) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the output's dtype and the log-sum-exp, f32[R, H]."""
    return attend_by_head(call, _attend_tiles)


def _attend_tiles(
    call: Call,
    queries: jax.Array,  # f32[R, K, G, D], scaled
) -> tuple[jax.Array, jax.Array]:
    """Go through all tiles; return `f32[R, K, G, Dv]` and `f32[R, K, G]`."""
    pools, tiles = call.pools, cut_rows(call, _TILE_ROWS)
    # Sizes that no step changes.
    width = max(1, _PIECE_TOKENS // pools.block_size)
    head_dim = max(queries.shape[3], pools.value_dim)
    piece_bytes = 4 * width * pools.block_size * pools.num_kv_heads * head_dim
    num_lanes = max(1, min(_TRIP_BYTES // piece_bytes, _MAX_LANES, tiles.most))
    order = _order_tiles(tiles, tiles.most_of_trips(num_lanes), width)
    return attend_tiles(queries, tiles, num_lanes=num_lanes, width=width, order=order)


def _order_tiles(
    tiles: RowTiles, num_tiles: int, width: int
) -> tuple[jax.Array, jax.Array]:
    """Return tiles by their pieces, the most first, and where each is, i32[tiles]."""
    index = jnp.arange(num_tiles, dtype=jnp.int32)
    first, last = find_pieces(tiles.call, tiles.locate(index)[1], width)
    counts = last - first
    # How many come before each, of a few hundred at most: cheaper than to sort.
    is_before = (counts[None] > counts[:, None]) | (
        (counts[None] == counts[:, None]) & (index[None] < index[:, None])
    )
    rank = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    return jnp.zeros_like(index).at[rank].set(index, unique_indices=True), rank
