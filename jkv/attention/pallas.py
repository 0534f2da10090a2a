"""The kernel: attention straight out of the pool, for GPUs, in Pallas over Triton.

The only file that imports a Pallas backend; another backend takes its place by offering
`attend_kernel`. One kernel body serves decoding and prefill. A program takes a tile of
query rows of one request and one kv head, walks a range of the request's tokens, and
keeps softmax sums (online softmax, arXiv 2205.14135). When decoding the ranges are the
pieces of a flat list (`kernel_work.py`): each program leaves a normalised partial
result and its log-sum-exp, and a second small kernel joins them row by row. Joining in
plain JAX would take atomics, which are not deterministic, or `B * W` memory.

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
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.attention.kernel_tuning import JOIN, KernelTuning, Tile
from jkv.attention.kernel_work import (
    Work,
    list_decode_work,
    list_prefill_work,
    num_decode_entries,
    num_prefill_entries,
)
from jkv.attention.requests import Requests
from jkv.attention.storage import Pools

MISSING: str | None = None
try:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as backend
except ImportError as error:  # a jaxlib that was built without it
    MISSING = f"this JAX has no Pallas backend for GPUs: {error}"

_HIDDEN = -1e30  # stands for -inf in scores: exp2(HIDDEN - HIDDEN) is not NaN
_LOG2E = math.log2(math.e)
_LN2 = math.log(2.0)
# Partial results joined at a time.
_JOIN_PIECES = 8


class Operands(NamedTuple):
    """What the attention kernel reads. Refs inside it, arrays outside."""

    work: Work | None  # i32[W] each; None until the list is made
    layer: jax.Array  # i32[1]
    scale: jax.Array  # f32[1]
    window: jax.Array | None  # i32[1]
    sinks: jax.Array | None  # f32[H], when the programs finish rows themselves
    block_tables: jax.Array  # i32[S, M]
    queries: jax.Array  # [R, H, D]
    keys: jax.Array  # [L, N, K, T, D]
    values: jax.Array | None  # [L, N, K, T, Dv]; None: the first Dv of the keys


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for, beside the shapes of its operands."""

    is_decode: bool  # the rows see all of their tokens, and leave partial results
    row_tokens: int  # tokens whose query rows share a tile; 1 for decoding
    row_heads: int  # query heads of one kv head in a tile; the rows are both together
    tokens: int  # of the keys in a tile
    value_dim: int
    operand_dtype: np.dtype[Any]  # what tiles are multiplied in
    kv_dtype: np.dtype[Any] | None  # what raw bits in the pool mean
    soft_cap: float | None


class Sums(NamedTuple):
    """Softmax sums of a tile of rows over the tokens so far, all f32."""

    maximum: jax.Array  # [rows], in units of log2
    total: jax.Array  # [rows]
    values: tuple[jax.Array, ...]  # [rows, size] for each piece of the value head dim


def cut(head_dim: int) -> list[tuple[int, int]]:
    """Cut a head dim into powers of two, (start, size): 96 is 64 and 32."""
    pieces, start = [], 0
    while start < head_dim:
        size = 1 << ((head_dim - start).bit_length() - 1)
        pieces.append((start, size))
        start += size
    return pieces


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
    num_query_rows, num_heads, head_dim = o.queries.shape
    _, num_blocks, num_kv_heads, block_size, _ = o.keys.shape
    group = num_heads // num_kv_heads
    value_pieces = cut(plan.value_dim)
    key_pieces = cut(head_dim)
    if o.values is None:
        rest = cut(head_dim - plan.value_dim)
        key_pieces = value_pieces + [(plan.value_dim + at, size) for at, size in rest]

    # Whose rows and which tokens.
    entry, head_tile = pl.program_id(0), pl.program_id(1)
    tiles_per_head = pl.cdiv(group, plan.row_heads)
    kv_head = lax.div(head_tile, jnp.int32(tiles_per_head))
    first_head = lax.rem(head_tile, jnp.int32(tiles_per_head)) * plan.row_heads
    table, num_rows = work.table[entry], work.num_rows[entry]
    first, end = work.first[entry], work.end[entry]
    layer = o.layer[0]

    # Tile row r is query head r % row_heads of token r // row_heads.
    index = jnp.arange(plan.row_tokens * plan.row_heads, dtype=jnp.int32)
    shift = plan.row_heads.bit_length() - 1
    row, head = index >> shift, first_head + (index & (plan.row_heads - 1))
    valid = (head < group) & (row < num_rows)
    head += kv_head * group
    position = work.position[entry] + row
    if not plan.is_decode:
        valid &= position >= 0
    row = work.row[entry] + row

    # Masked loads are clamped all the same; masked stores never are, or two would
    # share an address.
    def load_queries(start: int, size: int) -> jax.Array:
        where = (
            jnp.minimum(row, num_query_rows - 1)[:, None],
            jnp.minimum(head, num_heads - 1)[:, None],
            _columns(start, size),
        )
        tile = backend.load(
            o.queries.at[where], mask=_spread(valid, size), other=0.0
        )
        return tile.astype(plan.operand_dtype)

    queries = [load_queries(*piece) for piece in key_pieces]
    score_scale = o.scale[0] * (_LOG2E if plan.soft_cap is None else 1.0)
    offsets = jnp.arange(plan.tokens, dtype=jnp.int32)
    walk_start = first & -plan.tokens

    def load_tokens(start: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """Load keys and values of the tile of tokens at `start`, by pieces."""
        column, block_shift = start, block_size.bit_length() - 1
        if block_size >= plan.tokens:
            # The tile lies in one block: one id, and offsets that hardly change.
            slot = start & (block_size - 1)
            slot += jnp.clip(offsets, first - start, end - 1 - start)
        else:
            column = jnp.clip(start + offsets, first, end - 1)
            slot = column & (block_size - 1)
        block = o.block_tables[table, column >> block_shift]
        # A wrong table may give wrong numbers, never a fault.
        block = jnp.clip(block, 0, num_blocks - 1)
        block = block if block_size >= plan.tokens else block[:, None]

        def load(pool: jax.Array, at: int, size: int) -> jax.Array:
            where = (layer, block, kv_head, slot[:, None], _columns(at, size))
            return _to_operand(pool[where], plan)

        keys = [load(o.keys, *piece) for piece in key_pieces]
        if o.values is None:
            return keys, keys[: len(value_pieces)]
        return keys, [load(o.values, *piece) for piece in value_pieces]

    def attend_tokens(index: jax.Array, sums: Sums, *, masked: bool) -> Sums:
        start = walk_start + index * plan.tokens
        keys, values = load_tokens(start)
        scores = _dot(queries[0], keys[0], transpose=True)
        for query, key in zip(queries[1:], keys[1:], strict=True):
            scores += _dot(query, key, transpose=True)
        scores *= score_scale
        if plan.soft_cap is not None:
            # c * tanh(x / c) by way of exp2, which every target has.
            power = jnp.exp2(scores * (2.0 * _LOG2E / plan.soft_cap))
            scores = plan.soft_cap * _LOG2E * (1.0 - 2.0 / (power + 1.0))

        token = start + offsets
        if plan.is_decode:
            visible = token < end
            if o.window is not None:
                visible &= token >= first
            visible = visible[None, :]
        else:
            visible = token[None, :] <= position[:, None]
            if o.window is not None:
                visible &= token[None, :] > position[:, None] - o.window[0]
        if masked:
            scores = jnp.where(visible, scores, _HIDDEN)
        maximum = jnp.maximum(sums.maximum, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - maximum[:, None])
        if masked and not plan.is_decode and o.window is not None:
            # Of such a tile a row may see nothing, and then its maximum is HIDDEN.
            weights = jnp.where(visible, weights, 0.0)
        shrink = jnp.exp2(sums.maximum - maximum)
        total = sums.total * shrink + jnp.sum(weights, axis=1)
        weights = weights.astype(plan.operand_dtype)
        summed = tuple(
            old * shrink[:, None] + _dot(weights, value)
            for old, value in zip(sums.values, values, strict=True)
        )
        return Sums(maximum, total, summed)

    # Tiles that every row sees as a whole come first and need no mask.
    sums = Sums(
        jnp.full(index.shape, _HIDDEN, jnp.float32),
        jnp.zeros(index.shape, jnp.float32),
        tuple(jnp.zeros((*index.shape, size), jnp.float32) for _, size in value_pieces),
    )
    if o.sinks is not None:
        # A sink is a token with the value zero.
        at_head = o.sinks.at[jnp.minimum(head, num_heads - 1)]
        sink = backend.load(at_head, mask=valid, other=0.0)
        sums = sums._replace(maximum=sink * _LOG2E, total=jnp.ones_like(sums.total))
    num_tiles = lax.div(end - walk_start + (plan.tokens - 1), jnp.int32(plan.tokens))
    num_full = jnp.int32(0)
    if not plan.is_decode and o.window is None:
        seen_by_all = jnp.clip(work.position[entry] + 1, 0, end)
        num_full = lax.div(seen_by_all, jnp.int32(plan.tokens))
        body = functools.partial(attend_tokens, masked=False)
        sums = lax.fori_loop(jnp.int32(0), num_full, body, sums)
    body = functools.partial(attend_tokens, masked=True)
    sums = lax.fori_loop(num_full, num_tiles, body, sums)

    # Rows that nobody stores may have seen nothing.
    total = jnp.where(sums.total > 0.0, sums.total, 1.0)
    out_row = jnp.broadcast_to(entry, index.shape) if plan.is_decode else row
    for (start, size), value in zip(value_pieces, sums.values, strict=True):
        where = (out_row[:, None], head[:, None], _columns(start, size))
        tile = (value / total[:, None]).astype(output_ref.dtype)
        backend.store(output_ref.at[where], tile, mask=_spread(valid, size))
    lse = sums.maximum + jnp.log2(total)
    lse = lse if plan.is_decode else lse * _LN2
    backend.store(lse_ref.at[out_row, head], lse, mask=valid)


def _join_kernel(
    first_ref: jax.Array,  # i32[R], pieces of each row
    end_ref: jax.Array,  # i32[R]
    sinks_ref: jax.Array | None,  # f32[H]
    partial_ref: jax.Array,  # f32[W, H, Dv]
    partial_lse_ref: jax.Array,  # f32[W, H], log2
    output_ref: jax.Array,  # [R, H, Dv]
    lse_ref: jax.Array,  # f32[R, H]
) -> None:
    """Join the partial results of one row and head; rows without pieces are zeros."""
    row, head = pl.program_id(0), pl.program_id(1)
    first, end = first_ref[row], end_ref[row]
    value_pieces = cut(partial_ref.shape[2])
    lanes = jnp.arange(_JOIN_PIECES, dtype=jnp.int32)

    def join(trip: jax.Array, sums: Sums) -> Sums:
        piece = first + trip * _JOIN_PIECES + lanes
        is_mine = piece < end
        piece = jnp.minimum(piece, end - 1)
        lse = jnp.where(is_mine, partial_lse_ref[piece, head], _HIDDEN)
        maximum = jnp.maximum(sums.maximum, jnp.max(lse))
        weights = jnp.exp2(lse - maximum)
        shrink = jnp.exp2(sums.maximum - maximum)
        summed = []
        for (start, size), old in zip(value_pieces, sums.values, strict=True):
            part = partial_ref[piece[:, None], head, _columns(start, size)]
            summed.append(old * shrink + jnp.sum(weights[:, None] * part, axis=0))
        total = sums.total * shrink + jnp.sum(weights)
        return Sums(maximum, total, tuple(summed))

    sink = None if sinks_ref is None else sinks_ref[head] * _LOG2E
    sums = Sums(
        jnp.float32(_HIDDEN) if sink is None else sink,
        jnp.float32(0.0 if sink is None else 1.0),
        tuple(jnp.zeros(size, jnp.float32) for _, size in value_pieces),
    )
    trips = lax.div(end - first + (_JOIN_PIECES - 1), jnp.int32(_JOIN_PIECES))
    sums = lax.fori_loop(jnp.int32(0), trips, join, sums)
    has_any = end > first
    total = jnp.where(has_any, sums.total, 1.0)
    for (start, size), value in zip(value_pieces, sums.values, strict=True):
        value = jnp.where(has_any, value / total, 0.0)
        where = (row, head, start + jnp.arange(size, dtype=jnp.int32))
        output_ref[where] = value.astype(output_ref.dtype)
    lse = (sums.maximum + jnp.log2(total)) * _LN2
    lse_ref[row, head] = jnp.where(has_any, lse, -jnp.inf)


@functools.partial(
    jax.jit, static_argnames=("soft_cap", "tuning", "interpret")
)
def attend_kernel(
    queries: jax.Array,  # [R, H, D], not scaled
    pools: Pools,
    layer: jax.Array,  # i32[]
    requests: Requests,
    *,
    scale: jax.Array,  # f32[]
    window: jax.Array | None,  # i32[]
    soft_cap: float | None,
    sinks: jax.Array | None,  # f32[H]
    tuning: KernelTuning,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the queries' dtype and the log-sum-exp, f32[R, H]."""
    # JAX 0.11 and later say so when they lower the kernel. It is known, and the reason
    # why one file holds a backend.
    warnings.filterwarnings(
        "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
    )
    num_rows, num_heads, _ = queries.shape
    num_requests, max_blocks = requests.seq_ids.shape[0], requests.block_tables.shape[1]
    group = num_heads // pools.num_kv_heads
    operands = Operands(
        work=None,
        layer=jnp.clip(layer, 0, pools.keys.shape[0] - 1)[None],
        scale=scale[None],
        window=None if window is None else window[None],
        sinks=None,
        block_tables=requests.block_tables,
        queries=queries,
        keys=pools.keys,
        values=pools.values,
    )
    make_plan = functools.partial(
        Plan,
        value_dim=pools.value_dim,
        # Neither what is stored nor what is asked loses a bit.
        operand_dtype=jnp.promote_types(queries.dtype, pools.max_dtype),
        kv_dtype=pools.kv_dtype,
        soft_cap=soft_cap,
    )
    launch = functools.partial(_launch, interpret=interpret)

    # Requests of one row: partial results of all pieces, then joined. Every row gets
    # its value here, rows of other requests zeros.
    tile = tuning.decode
    padded_group = 1 << (group - 1).bit_length()
    row_heads = max(16, min(padded_group, tile.rows))
    plan = make_plan(
        is_decode=True, row_tokens=1, row_heads=row_heads, tokens=tile.tokens
    )
    head_tiles = pools.num_kv_heads * pl.cdiv(group, row_heads)
    num_entries = num_decode_entries(
        num_rows,
        num_requests,
        max_blocks * pools.block_size,
        pl.cdiv(tuning.programs, head_tiles),
    )
    work, pieces = list_decode_work(
        requests, window, num_rows=num_rows, num_entries=num_entries
    )
    partial = launch(
        "jkv_decode",
        functools.partial(_attention_kernel, plan=plan),
        (operands._replace(work=work), None, None),
        grid=(num_entries, head_tiles),
        shape=(num_entries, num_heads, pools.value_dim),
        dtype=jnp.float32,
        tile=tile,
    )
    output, lse = launch(
        "jkv_join",
        _join_kernel,
        (pieces.first, pieces.end, sinks, *partial),
        grid=(num_rows, num_heads),
        shape=(num_rows, num_heads, pools.value_dim),
        dtype=queries.dtype,
        tile=JOIN,
    )
    if num_rows < 2:
        return output, lse

    # Requests of several rows replace their rows.
    tile = tuning.prefill
    row_heads = min(padded_group, tile.rows)
    plan = make_plan(
        is_decode=False,
        row_tokens=tile.rows // row_heads,
        row_heads=row_heads,
        tokens=tile.tokens,
    )
    num_entries = num_prefill_entries(num_rows, num_requests, plan.row_tokens)
    work = list_prefill_work(
        requests, window, tile_rows=plan.row_tokens, num_entries=num_entries
    )
    return launch(
        "jkv_prefill",
        functools.partial(_attention_kernel, plan=plan),
        (operands._replace(work=work, sinks=sinks), output, lse),
        grid=(num_entries, pools.num_kv_heads * pl.cdiv(group, row_heads)),
        shape=output.shape,
        dtype=output.dtype,
        tile=tile,
        in_place=True,
    )


def _launch(
    name: str,
    kernel: Callable[..., None],
    operands: tuple[Any, ...],
    *,
    grid: tuple[int, int],
    shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    tile: Tile,
    interpret: bool,
    in_place: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Run a kernel that writes an array of a shape and one f32 for each of its rows.

    In place, the last two operands are the arrays that it changes.
    """
    whole = pl.BlockSpec(memory_space=pl.ANY)
    last = len(jax.tree.leaves(operands)) - 1

    def named(*refs: Any) -> None:
        kernel(*refs)

    named.__name__ = name  # what profilers show
    output, lse = pl.pallas_call(
        named,
        grid=grid,
        in_specs=jax.tree.map(lambda _: whole, operands),
        out_specs=(whole, whole),
        out_shape=(
            jax.ShapeDtypeStruct(shape, dtype),
            jax.ShapeDtypeStruct(shape[:2], jnp.float32),
        ),
        input_output_aliases={last - 1: 0, last: 1} if in_place else {},
        compiler_params=backend.CompilerParams(
            num_warps=tile.num_warps, num_stages=tile.num_stages
        ),
        interpret=interpret,
    )(*operands)
    return output, lse


def _columns(start: int, size: int) -> jax.Array:
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


def _to_operand(tile: jax.Array, plan: Plan) -> jax.Array:
    """Turn stored elements into an operand of a dot: the place to dequantise them."""
    if plan.kv_dtype is not None and tile.dtype != plan.kv_dtype:
        tile = lax.bitcast_convert_type(tile, plan.kv_dtype)
    return tile.astype(plan.operand_dtype)
