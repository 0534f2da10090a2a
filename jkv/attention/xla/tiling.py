"""Tiles of query rows and the chunks of blocks that they see."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.attention.call import Call, Pools, Stored
from jkv.attention.softmax import HIDDEN
from jkv.attention.xla.lanes import (
    cap_scores,
    divide_up,
    gather,
    gather_pieces,
    multiply,
    quotient,
)
from jkv.formats.format import multiply_out

_MAX_TILE_ROWS = 128


_MIN_TILE_ROWS = 16


_CHUNK_TOKENS = 256


class Tiling(NamedTuple):
    """How the rows and blocks of a call are cut."""

    call: Call
    tile_rows: int  # Q
    chunk_blocks: int  # C
    ends: jax.Array  # i32[B], tiles of all requests up to and with this one


class RowTile(NamedTuple):
    """Some consecutive rows of one request and the blocks that they can see."""

    start: jax.Array  # i32[], the first row; `Q` rows from here are inside the batch
    last: jax.Array  # i32[Q], the last token in the pools that the row sees, or -1
    before: jax.Array | None  # i32[Q], the last one before its window
    valid: jax.Array  # bool[Q], the other rows belong to other tiles or requests
    table: jax.Array  # i32[M], the blocks of the request's sequence
    first_block: jax.Array  # i32[], column of the first block that a row sees
    num_chunks: jax.Array  # i32[]


class BlockChunk(NamedTuple):
    """Some consecutive blocks of a tile's request and which rows see their tokens."""

    blocks: jax.Array  # i32[C], ids
    visible: jax.Array  # bool[Q, C * T], which row sees which token
    used: jax.Array  # bool[C * T], seen by any row: no other may be let into a sum


def make_tiling(call: Call, *, min_rows: int) -> Tiling:
    """Cut the requests of at least `min_rows` rows into tiles."""
    # Small tiles waste less on short requests, large ones read each block less often.
    # Requests of 64 rows and a longer one, as trees of texts are, shall have 64.
    mean_rows = -(-call.num_rows // call.num_requests)
    tile_rows = _MIN_TILE_ROWS
    while 5 * tile_rows < 4 * min(mean_rows, _MAX_TILE_ROWS):
        tile_rows *= 2
    tile_rows = min(tile_rows, call.num_rows)
    lengths = call.requests.query_lengths
    counts = jnp.where(lengths >= min_rows, divide_up(lengths, tile_rows), 0)
    chunk_blocks = min(_CHUNK_TOKENS // call.pools.block_size, call.max_blocks)
    return Tiling(
        call=call,
        tile_rows=tile_rows,
        chunk_blocks=max(1, chunk_blocks),
        ends=jnp.cumsum(counts, dtype=jnp.int32),
    )


def locate_tile(tiling: Tiling, index: jax.Array) -> RowTile:
    """Find the rows of tile `index` and what they see."""
    call, requests = tiling.call, tiling.call.requests
    block_size = call.pools.block_size
    request = jnp.sum(tiling.ends <= index, dtype=jnp.int32)
    before = jnp.where(request > 0, gather(tiling.ends, request - 1), 0)
    first_offset = (index - before) * tiling.tile_rows
    length = gather(requests.query_lengths, request)
    start = gather(requests.query_starts, request) + first_offset
    # A slice past the last row would be moved back unasked, so move it here.
    excess = jnp.maximum(start + tiling.tile_rows - call.num_rows, 0)
    offsets = first_offset - excess + jnp.arange(tiling.tile_rows, dtype=jnp.int32)
    first_position = gather(requests.context_lengths, request) - length
    last_offset = jnp.minimum(first_offset + tiling.tile_rows, length) - 1
    last_position = first_position + last_offset
    positions = first_position + offsets
    first_block, starts = jnp.int32(0), None
    if call.window is not None:
        starts = call.find_held(positions - call.window)
        first = call.find_held(first_position + first_offset - call.window) + 1
        first_block = quotient(jnp.maximum(first, 0), block_size)
    end = call.find_held(last_position) + 1
    num_tokens = jnp.maximum(end - first_block * block_size, 0)
    chunk_tokens = tiling.chunk_blocks * block_size
    return RowTile(
        start=start - excess,
        last=call.find_held(positions),
        before=starts,
        valid=(offsets >= first_offset) & (offsets < length),
        table=gather(requests.block_tables, gather(requests.seq_ids, request)),
        first_block=first_block,
        num_chunks=divide_up(num_tokens, chunk_tokens),
    )


def locate_chunk(tiling: Tiling, tile: RowTile, index: jax.Array) -> BlockChunk:
    """Find the blocks of chunk `index` of a tile and what its rows see of them."""
    block_size = tiling.call.pools.block_size
    first_block = tile.first_block + index * tiling.chunk_blocks
    columns = first_block + jnp.arange(tiling.chunk_blocks, dtype=jnp.int32)
    blocks = gather(tile.table, columns)
    tokens = first_block * block_size + jnp.arange(
        tiling.chunk_blocks * block_size, dtype=jnp.int32
    )
    visible = tokens[None, :] <= tile.last[:, None]
    if tile.before is not None:
        visible &= tokens[None, :] > tile.before[:, None]
    visible &= tile.valid[:, None]
    return BlockChunk(blocks, visible, visible.any(axis=0))


def score_chunk(
    queries: jax.Array,  # f32[K, G, Q, D], scaled
    keys: jax.Array,  # f32[K, C * T, D]
    visible: jax.Array,  # bool[Q, C * T]
    soft_cap: float | None,
    marks: jax.Array,  # f32[K, C * T], of broken tokens
) -> jax.Array:
    """Return the masked scores, `f32[K, G, Q, C * T]`."""
    scores = cap_scores(multiply("kgqd,ksd->kgqs", queries, keys), soft_cap)
    scores += marks[:, None, None]
    return jnp.where(visible[None, None], scores, HIDDEN)


def gather_heads(
    pools: Pools,
    layer: jax.Array,  # i32[]
    blocks: jax.Array,  # i32[C]
) -> tuple[jax.Array, jax.Array]:
    """Return keys and values of the blocks by head, `f32[K, C * T, D]` and `Dv`."""

    def gather_rows(stored: Stored, head_dim: int) -> jax.Array:
        flat, factor = gather_pieces(stored, layer, blocks[None])
        rows = flat.reshape(pools.num_kv_heads, -1, head_dim)
        return multiply_out(rows, None if factor is None else factor[0])

    keys = gather_rows(pools.stored_keys, pools.head_dim)
    if pools.stored_values is None:
        return keys, keys[..., : pools.value_dim]
    return keys, gather_rows(pools.stored_values, pools.value_dim)
