"""The attention kernel: straight out of the pool, one body for decoding and prefill.

A program takes a tile of query rows of one request and one kv head, walks a range of
the request's tokens, and keeps softmax sums (online softmax, arXiv 2205.14135). When
decoding the ranges are pieces of contexts, and a program leaves a normalised partial
result in float32 and its log-sum-exp.

What the Triton lowering asks for shapes the code: every operand is passed whole and
indexed by hand (the pool, the layer and the tables go in as they are, nothing is sliced
or gathered outside); every tile is a power of two, so the query heads of a kv head are
padded, and head dims are cut into powers of two; shifts and masks instead of divisions.

Tokens are clamped into the visible range, so nothing stale or foreign is ever loaded,
and only scores need a mask. Scores carry a factor log2(e): the hardware has exp2.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.attention.kernel import backend
from jkv.attention.kernel.elements import BFLOAT16, FLOAT32, to_operand
from jkv.attention.kernel.tuning import Tile
from jkv.attention.kernel.work import Work

# Stands for -inf in scores: exp2(HIDDEN - HIDDEN) is not NaN.
HIDDEN = -1e30


LOG2E = math.log2(math.e)


LN2 = math.log(2.0)


class Operands(NamedTuple):
    """What the attention kernel reads. Refs inside it, arrays outside."""

    work: Work  # i32[W] each
    layer: jax.Array  # i32[1]
    scale: jax.Array  # f32[1]
    window: jax.Array | None  # i32[1]
    sinks: jax.Array | None  # f32[H], where the programs finish rows themselves
    block_tables: jax.Array  # i32[S, M]
    queries: jax.Array  # [R, H, D]
    keys: jax.Array  # [L, N, K, T, D]
    values: jax.Array | None  # [L, N, K, T, Dv]; None: the first Dv of the keys
    key_scales: jax.Array | None  # [L, N, K, T], as in `Pools`
    value_scales: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the attention kernel is compiled for, beside the shapes of its operands."""

    is_decode: bool  # one row that sees all tokens of its range, and partial results
    tile: Tile
    row_tokens: int  # tokens whose query rows share a tile; 1 for decoding
    row_heads: int  # query heads of one kv head in a tile; the rows are both together
    value_dim: int
    operand_dtype: np.dtype[Any]  # what queries and keys are multiplied in
    weight_dtype: np.dtype[Any]  # what weights and values are multiplied in
    kv_dtype: np.dtype[Any] | None  # what raw bits in the pool mean
    soft_cap: float | None
    interpret: bool


class Sums(NamedTuple):
    """Softmax sums over the tokens so far, all f32. `...` is the rows of a tile."""

    maximum: jax.Array  # [...], in units of log2
    total: jax.Array  # [...]
    values: tuple[jax.Array, ...]  # [..., size] for each piece of the value head dim


class Range(NamedTuple):
    """Where a program finds its tokens: scalars."""

    layer: jax.Array
    table: jax.Array  # row of the block tables
    kv_head: jax.Array
    first: jax.Array  # the first token that it may load
    end: jax.Array  # past the last one


def cut(head_dim: int, start: int = 0) -> list[tuple[int, int]]:
    """Cut a head dim into powers of two, (start, size): 96 is 64 and 32."""
    pieces = []
    while head_dim:
        size = 1 << (head_dim.bit_length() - 1)
        pieces.append((start, size))
        start, head_dim = start + size, head_dim - size
    return pieces


def attend_pieces(operands: Operands, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Return the partial results of all pieces, f32[W, H, Dv], and log2 sums f32[W, H].

    Entries without work are left as they are found.
    """
    num_entries, num_heads = operands.work.row.shape[0], operands.queries.shape[1]
    return backend.launch(
        "jkv_decode",
        functools.partial(_attention_kernel, plan=plan),
        (operands, None, None),
        grid=(num_entries, _num_head_tiles(operands, plan)),
        shape=(num_entries, num_heads, plan.value_dim),
        dtype=jnp.float32,
        num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages,
        interpret=plan.interpret,
    )


def attend_rows(
    operands: Operands,
    output: jax.Array,  # [R, H, Dv]
    lse: jax.Array,  # f32[R, H]
    plan: Plan,
) -> tuple[jax.Array, jax.Array]:
    """Return both with the rows of all tiles replaced, in place."""
    num_rows, num_heads, value_dim = output.shape
    return backend.launch(
        "jkv_prefill",
        functools.partial(_attention_kernel, plan=plan),
        (operands, output, lse),
        grid=(operands.work.row.shape[0], _num_head_tiles(operands, plan)),
        shape=(num_rows, num_heads, value_dim),
        dtype=output.dtype,
        num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages,
        interpret=plan.interpret,
        in_place=True,
    )


def _attention_kernel(
    operands: Operands,
    output_before: jax.Array | None,
    lse_before: jax.Array | None,
    output_ref: jax.Array,
    lse_ref: jax.Array,
    *,
    plan: Plan,
) -> None:
    """Attend from one tile of rows to one range of tokens.

    Decoding writes f32[W, H, Dv] and the log2 of the sums f32[W, H]; otherwise the rows
    of [R, H, Dv] and f32[R, H], which alias the arrays before, are replaced.
    """
    del output_before, lse_before
    o, work = operands, operands.work
    num_heads, head_dim = o.queries.shape[1:]
    group = num_heads // o.keys.shape[2]
    value_pieces = cut(plan.value_dim)
    key_pieces = cut(head_dim)
    if o.values is None:
        key_pieces = value_pieces + cut(head_dim - plan.value_dim, plan.value_dim)

    # Row r of the tile is query head r % row_heads of token r // row_heads.
    entry, head_tile = backend.program_id(0), backend.program_id(1)
    tiles_per_head = jnp.int32(-(-group // plan.row_heads))
    kv_head = lax.div(head_tile, tiles_per_head)
    index = jnp.arange(plan.row_tokens * plan.row_heads, dtype=jnp.int32)
    offset = index >> (plan.row_heads.bit_length() - 1)
    head = lax.rem(head_tile, tiles_per_head) * plan.row_heads
    head += index & (plan.row_heads - 1)
    valid = (head < group) & (offset < work.num_rows[entry])
    head += kv_head * group
    row, position = work.row[entry] + offset, work.position[entry] + offset
    if not plan.is_decode:
        valid &= position >= 0
    queries = [_load_rows(o.queries, row, head, valid, p, plan) for p in key_pieces]

    # The walk starts at a multiple of the tile, so that a tile lies in one block.
    tokens = Range(
        layer=o.layer[0],
        table=work.table[entry],
        kv_head=kv_head,
        first=work.first[entry],
        end=work.end[entry],
    )
    tile_tokens = plan.tile.tokens
    walk_start = tokens.first & -tile_tokens
    scale = o.scale[0] * (LOG2E if plan.soft_cap is None else 1.0)

    def see(token: jax.Array) -> jax.Array:
        """Return which rows see which tokens, to broadcast over the scores."""
        if plan.is_decode:
            visible = token < tokens.end
            if o.window is not None:
                visible &= token >= tokens.first
            return visible[None, :]
        visible = token[None, :] <= position[:, None]
        if o.window is not None:
            visible &= token[None, :] > position[:, None] - o.window[0]
        return visible

    def attend_tokens(trip: jax.Array, sums: Sums, *, masked: bool) -> Sums:
        start = walk_start + trip * tile_tokens
        tile = _load_tokens(o, tokens, start, key_pieces, value_pieces, plan)
        keys, values = tile.keys, tile.values
        scores = _dot(queries[0], keys[0], transpose=True)
        for query, key in zip(queries[1:], keys[1:], strict=True):
            scores += _dot(query, key, transpose=True)
        factor = scale if tile.key_scales is None else scale * tile.key_scales[None, :]
        scores = _cap(scores * factor, plan.soft_cap)
        visible = see(start + jnp.arange(tile_tokens, dtype=jnp.int32))
        if masked:
            scores = jnp.where(visible, scores, HIDDEN)
        maximum = jnp.maximum(sums.maximum, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - maximum[:, None])
        if masked and not plan.is_decode and o.window is not None:
            # A row may see nothing of a tile, and its maximum may still be HIDDEN.
            weights = jnp.where(visible, weights, 0.0)
        shrink = jnp.exp2(sums.maximum - maximum)
        total = sums.total * shrink + jnp.sum(weights, axis=1)
        if tile.value_scales is not None:
            weights *= tile.value_scales[None, :]
        weights = weights.astype(plan.weight_dtype)
        summed = tuple(
            old * shrink[:, None] + _dot(weights, value)
            for old, value in zip(sums.values, values, strict=True)
        )
        return Sums(maximum, total, summed)

    sink = None
    if o.sinks is not None:
        sink = backend.load(o.sinks, (_clamp(head, num_heads),), valid)
    sums = start_sums(index.shape, value_pieces, sink)
    num_tiles = lax.div(
        tokens.end - walk_start + (tile_tokens - 1), jnp.int32(tile_tokens)
    )
    num_full = jnp.int32(0)
    if plan.tile.has_full_loop and o.window is None:
        # Tiles that every row sees as a whole come first and need no mask.
        seen_by_all = jnp.clip(work.position[entry] + 1, 0, tokens.end)
        num_full = lax.div(seen_by_all, jnp.int32(tile_tokens))
        body = functools.partial(attend_tokens, masked=False)
        sums = lax.fori_loop(jnp.int32(0), num_full, body, sums)
    body = functools.partial(attend_tokens, masked=True)
    sums = lax.fori_loop(num_full, num_tiles, body, sums)

    # Stores are never clamped: two of them would share an address.
    total = jnp.where(sums.total > 0.0, sums.total, 1.0)  # rows that nobody stores
    row = jnp.broadcast_to(entry, index.shape) if plan.is_decode else row
    for (start, size), value in zip(value_pieces, sums.values, strict=True):
        where = (row[:, None], head[:, None], columns_of(start, size))
        value = (value / total[:, None]).astype(output_ref.dtype)
        backend.store(output_ref, where, value, _spread(valid, size))
    lse = sums.maximum + jnp.log2(total)
    lse = lse if plan.is_decode else lse * LN2
    backend.store(lse_ref, (row, head), lse, valid)


def _load_rows(
    queries: jax.Array,  # [R, H, D]
    row: jax.Array,  # i32[rows]
    head: jax.Array,  # i32[rows]
    valid: jax.Array,  # bool[rows]
    piece: tuple[int, int],
    plan: Plan,
) -> jax.Array:
    """Load one piece of the head dim of query rows, zeros where they are not valid."""
    num_rows, num_heads, _ = queries.shape
    row, head = _clamp(row, num_rows), _clamp(head, num_heads)
    where = (row[:, None], head[:, None], columns_of(*piece))
    tile = backend.load(queries, where, _spread(valid, piece[1]))
    return tile.astype(plan.operand_dtype)


class TokenTile(NamedTuple):
    """Some consecutive tokens of one kv head."""

    keys: list[jax.Array]  # [tokens, size] for each piece of the key head dim
    values: list[jax.Array]  # likewise of the value head dim
    key_scales: jax.Array | None  # f32[tokens]
    value_scales: jax.Array | None


def _load_tokens(
    o: Operands,
    tokens: Range,
    start: jax.Array,  # i32[], a multiple of the tile
    key_pieces: list[tuple[int, int]],
    value_pieces: list[tuple[int, int]],
    plan: Plan,
) -> TokenTile:
    """Load the tile of tokens at `start`."""
    num_blocks, block_size = o.keys.shape[1], o.keys.shape[3]
    block_shift, tile_tokens = block_size.bit_length() - 1, plan.tile.tokens
    offsets = jnp.arange(tile_tokens, dtype=jnp.int32)
    last = tokens.end - 1
    if block_size >= tile_tokens:
        # One block: a scalar id, and offsets that differ in the edge tiles only.
        column = start >> block_shift
        slot = start & (block_size - 1)
        slot += jnp.clip(offsets, tokens.first - start, last - start)
    else:
        token = jnp.clip(start + offsets, tokens.first, last)
        column, slot = token >> block_shift, token & (block_size - 1)
    # A wrong table may give wrong numbers, never a fault.
    block = jnp.clip(o.block_tables[tokens.table, column], 0, num_blocks - 1)
    row = block if block_size >= tile_tokens else block[:, None]

    def load(
        pool: jax.Array, pieces: list[tuple[int, int]], dtype: np.dtype[Any]
    ) -> list[jax.Array]:
        where = (tokens.layer, row, tokens.kv_head, slot[:, None])
        stored = [pool[*where, columns_of(*piece)] for piece in pieces]
        return [to_operand(tile, plan.kv_dtype, dtype) for tile in stored]

    def load_scales(scales: jax.Array | None) -> jax.Array | None:
        if scales is None:
            return None
        found = scales[tokens.layer, block, tokens.kv_head, slot]
        return to_operand(found, BFLOAT16, FLOAT32)

    key_scales = load_scales(o.key_scales)
    keys = load(o.keys, key_pieces, plan.operand_dtype)
    if o.values is None:
        values = keys[: len(value_pieces)]
        if plan.weight_dtype != plan.operand_dtype:
            values = load(o.keys, value_pieces, plan.weight_dtype)
        return TokenTile(keys, values, key_scales, key_scales)
    value_scales = load_scales(o.value_scales)
    values = load(o.values, value_pieces, plan.weight_dtype)
    return TokenTile(keys, values, key_scales, value_scales)


def _cap(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Apply `c * tanh(x / c)` by way of exp2, and the factor log2(e) with it."""
    if soft_cap is None:
        return scores
    power = jnp.exp2(scores * (2.0 * LOG2E / soft_cap))
    return soft_cap * LOG2E * (1.0 - 2.0 / (power + 1.0))


def start_sums(
    shape: tuple[int, ...], pieces: list[tuple[int, int]], sink: jax.Array | None
) -> Sums:
    """Sums over no token yet; a sink is a token with the value zero."""
    values = tuple(jnp.zeros((*shape, size), jnp.float32) for _, size in pieces)
    if sink is not None:
        return Sums(sink * LOG2E, jnp.ones(shape, jnp.float32), values)
    maximum = jnp.full(shape, HIDDEN, jnp.float32)
    return Sums(maximum, jnp.zeros(shape, jnp.float32), values)


def _num_head_tiles(operands: Operands, plan: Plan) -> int:
    num_kv_heads = operands.keys.shape[2]
    group = operands.queries.shape[1] // num_kv_heads
    return num_kv_heads * -(-group // plan.row_heads)


def _clamp(index: jax.Array, size: int) -> jax.Array:
    """Bring an index of a masked load into the array, which interpreting asks for."""
    return jnp.minimum(index, size - 1)


def columns_of(start: int, size: int) -> jax.Array:
    """Return a piece of a head dim as indices, i32[1, size]."""
    return (start + jnp.arange(size, dtype=jnp.int32))[None, :]


def _spread(mask: jax.Array, size: int) -> jax.Array:
    return jnp.broadcast_to(mask[:, None], (*mask.shape, size))


def _dot(one: jax.Array, other: jax.Array, *, transpose: bool = False) -> jax.Array:
    """Multiply tiles into float32, without rounding float32 operands."""
    dimensions = (((1,), (1 if transpose else 0,)), ((), ()))
    return lax.dot_general(
        one,
        other,
        dimensions,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
