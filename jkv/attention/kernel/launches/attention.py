"""Attention by the kernels: decoding in pieces, then requests of several rows.

Three launches: partial results of all pieces of one-row requests (`work/`), their join,
which also clears all other rows, and the tiles of requests of several rows, which fill
these in. A launch without work exits at once; the third one is omitted in steps that
only decode. Batch-invariant calls (`by_position`) process all rows in pieces.
"""

import functools

import jax
import jax.numpy as jnp

from jkv.attention.backend import Call, check_call
from jkv.attention.kernel import backend
from jkv.attention.kernel.bodies.attention import attend_range
from jkv.attention.kernel.bodies.isolation import isolate_range
from jkv.attention.kernel.bodies.join import join_pieces
from jkv.attention.kernel.bodies.loads import Operands
from jkv.attention.kernel.elements.formats import KernelFormat
from jkv.attention.kernel.tiles.table import Techniques, Tuning
from jkv.attention.kernel.tiles.variant import (
    Variant,
    count_decode_pieces,
    count_lanes,
    cut_rows,
    decode_variant,
    position_variant,
    prefill_variant,
)
from jkv.attention.kernel.work.cutting import (
    list_work,
    size_decode_work,
    size_position_work,
    size_prefill_work,
)
from jkv.attention.kernel.work.lists import (
    DecodeSizes,
    ListSizes,
    Work,
    WorkList,
    find_list,
)


def attend_kernel(
    call: Call, *, tuning: Tuning, way: backend.Way
) -> tuple[jax.Array, jax.Array]:
    """Return [R, H, Dv] in the output's dtype and the log-sum-exp, f32[R, H]."""
    check_call(call)
    launch = _launch_by_position if call.by_position else _launch_all
    launch = functools.partial(launch, tuning=tuning, way=way)
    return backend.defer(launch, (call,), call.results, way)


def _launch_by_position(
    call: Call, *, tuning: Tuning, way: backend.Way
) -> tuple[jax.Array, jax.Array]:
    """Compute batch-invariant attention: tiles of one shape, one piece per program.

    As `jkv.attention.xla.tiles`, with other orders of summation. Pieces begin at
    multiples of a number of tokens derived from the longest possible context, and are
    walked in tiles at fixed positions; fully masked tiles leave a row's sums
    bit-identical. Each row stores its partial results in its own places, joined in
    order. The number of programs is static; programs without tokens exit at once.
    """
    sizes = size_position_work(
        call.num_rows,
        call.num_requests,
        call.max_blocks * call.pools.block_size,
        cut_rows(call.heads_per_kv, tuning.position_tile(None))[1],
        piece_tokens=tuning.piece_tokens,
        max_pieces=tuning.max_pieces,
    )
    listed = _find_list(call, sizes)
    variant = position_variant(
        call, tuning, sizes.piece_tokens, sizes.num_pieces, way=way
    )
    num_places = call.num_rows * variant.num_pieces
    return attend_pieces("jkv_position", call, listed, variant, num_places)


def _launch_all(
    call: Call, *, tuning: Tuning, way: backend.Way
) -> tuple[jax.Array, jax.Array]:
    output, lse = decode_rows(call, tuning, way=way)
    if call.num_rows < 2 or call.is_decoding:
        return output, lse
    variant = prefill_variant(call, tuning, way=way)
    return prefill_rows(call, variant, output, lse)


def decode_rows(
    call: Call, tuning: Tuning, *, way: backend.Way
) -> tuple[jax.Array, jax.Array]:
    """Compute the rows of one-row requests; other rows are zeros and -inf."""
    heads_per_kv, max_tokens = (
        call.heads_per_kv,
        call.max_blocks * call.pools.block_size,
    )
    wanted = count_decode_pieces(call.pools.num_kv_heads, heads_per_kv, tuning)
    size = functools.partial(
        size_decode_work, call.num_rows, call.num_requests, max_tokens, wanted
    )
    if call.window is None:
        lanes = size(num_lanes=count_lanes(heads_per_kv, tuning))
        listed = _find_list(call, lanes, size())
    else:  # lanes would need windows of their own
        listed = _find_list(call, size(), size(is_windowed=True))
    assert isinstance(listed.sizes, DecodeSizes)
    num_lanes = listed.sizes.num_lanes
    variant = decode_variant(call, tuning, num_lanes, way=way)
    num_places = listed.sizes.num_entries * num_lanes
    return attend_pieces("jkv_decode", call, listed, variant, num_places)


def _find_list(
    call: Call,
    *sizes: ListSizes,  # of supported lists, in order of preference
) -> WorkList:
    """Return the first list planned with the step, or list the work of the call."""
    for each in sizes:
        listed = find_list(call, each)
        if listed is not None:
            return listed
    return list_work(
        call.requests,
        sizes[-1],
        call.window,
        num_parts=call.num_parts,
        part_size=call.pools.block_size,
        past=call.past,
    )


def prefill_rows(
    call: Call,
    variant: Variant,
    output: jax.Array,  # [R, H, Dv]
    lse: jax.Array,  # f32[R, H]
) -> tuple[jax.Array, jax.Array]:
    """Fill in the rows of requests of several rows, in place."""
    sizes = size_prefill_work(call.num_rows, call.num_requests, variant.row_tokens)
    operands = make_operands(call, _find_list(call, sizes).work, variant)
    return _launch_rows(operands, output, lse, variant)


def make_operands(call: Call, work: Work, variant: Variant) -> Operands:
    """Return the kernel's operands without any computation.

    Each operation here would be one more launch in every layer.
    """
    pools = call.pools
    return Operands(
        work=work,
        lanes=None,
        layer=call.layer[None],
        scale=call.scale[None],
        window=None if call.window is None else call.window[None],
        part=None if call.part is None else call.part[None],
        sinks=call.sinks,
        block_tables=call.requests.block_tables,
        queries=call.queries,
        keys=_view(pools.keys, variant.key_format, variant),
        values=None
        if pools.values is None
        else _view(pools.values, variant.value_format, variant),
        key_scales=pools.key_scales,
        value_scales=pools.value_scales,
    )


def _view(pool: jax.Array, kept: KernelFormat, variant: Variant) -> jax.Array:
    """View a pool as the dtype that the kernel loads, [..., D] or fewer columns."""
    # Carried tiles stay raw bits: on gfx942 the first one would be waited for twice.
    has_view = not variant.interpret and Techniques.CARRIED not in variant.tile.ways
    dtype = kept.view_of(has_words=variant.has_words, has_view=has_view)
    if dtype is None or pool.dtype == dtype:
        return pool
    if not variant.interpret:
        return backend.view_as(pool, dtype)
    groups = pool.reshape(*pool.shape[:-1], -1, dtype.itemsize)
    return jax.lax.bitcast_convert_type(groups, dtype)


def attend_pieces(
    name: str,  # of the attention kernel, shown in profilers
    call: Call,
    listed: WorkList,
    variant: Variant,
    # of partial results; places without a piece stay uninitialized
    num_places: int,
) -> tuple[jax.Array, jax.Array]:
    """Compute the partial results of all pieces and join them, with sinks."""
    assert listed.pieces is not None
    lanes = listed.lanes if call.window is None else None
    operands = make_operands(call, listed.work, variant)
    operands = operands._replace(sinks=None, lanes=lanes)
    shape = num_places, call.num_heads, variant.value_dim
    partial, partial_lse = backend.launch(
        name,
        functools.partial(attend_range, variant=variant),
        (operands, None, None),
        shape_results(shape, jnp.float32),
        grid=_find_grid(operands, variant),
        compilation=find_compilation(variant),
    )
    if not (variant.is_decode or call.is_decoding):
        partial = _isolate(operands, partial, variant)
    return join_pieces(
        listed.pieces,
        call.sinks,
        partial,
        partial_lse,
        call.output_dtype,
        num_entries=num_places // (variant.row_tokens if variant.is_decode else 1),
        way=variant.way,
    )


def _launch_rows(
    operands: Operands,
    output: jax.Array,  # [R, H, Dv]
    lse: jax.Array,  # f32[R, H]
    variant: Variant,
) -> tuple[jax.Array, jax.Array]:
    """Replace the rows of all tiles, in place."""
    output, lse = backend.launch(
        "jkv_prefill",
        functools.partial(attend_range, variant=variant),
        (operands, output, lse),
        shape_results(output.shape, output.dtype),
        grid=_find_grid(operands, variant),
        compilation=find_compilation(variant),
        in_place=True,
    )
    return _isolate(operands, output, variant), lse


def _isolate(operands: Operands, output: jax.Array, variant: Variant) -> jax.Array:
    """Recompute rows that are NaN only because of masked values, in place."""
    isolated: jax.Array
    (isolated,) = backend.launch(
        "jkv_isolate",
        functools.partial(isolate_range, variant=variant),
        (operands, output),
        (jax.ShapeDtypeStruct(output.shape, output.dtype),),
        grid=_find_grid(operands, variant),
        compilation=find_compilation(variant, is_rare=True),
        in_place=True,
    )
    return isolated


def _find_grid(operands: Operands, variant: Variant) -> tuple[int, int]:
    num_entries = operands.work.row.shape[0] * max(1, variant.num_pieces)
    return num_entries * variant.head_tiles, 1


def shape_results(
    shape: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return the shapes of an output and of one number per row."""
    return (
        jax.ShapeDtypeStruct(shape, dtype),
        jax.ShapeDtypeStruct(shape[:2], jnp.float32),
    )


def find_compilation(variant: Variant, *, is_rare: bool = False) -> backend.Compilation:
    """Return the compilation parameters of a kernel.

    Rarely executed kernels are not pipelined, which saves registers.
    """
    tile, stages = variant.tile, 1 if is_rare else variant.tile.num_stages
    return backend.Compilation(tile.num_warps, stages, variant.way)
