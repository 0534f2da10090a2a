"""Attention by the kernel: decode rows piece by piece, then rows of several at once.

Three launches: partial results of all pieces of the requests of one row (`work/`),
their joining, which also clears all other rows, and the tiles of the requests of
several rows, which fill theirs in. A launch without work ends at once; where no request
can have several rows there is no third one. Where bits shall depend on a row's position
alone all rows go one way, in pieces.
"""

import functools

import jax
import jax.numpy as jnp

from jkv.attention.call import Call, check_call
from jkv.attention.kernel import backend
from jkv.attention.kernel.bodies.attention import attend_range
from jkv.attention.kernel.bodies.isolation import isolate_range
from jkv.attention.kernel.bodies.join import join_pieces
from jkv.attention.kernel.bodies.loads import Operands
from jkv.attention.kernel.elements.formats import KernelFormat
from jkv.attention.kernel.tiles.table import Tuning, Ways
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
    """Go through all rows in tiles of one shape, each with one piece of its context.

    For the same promise as `jkv.attention.xla.tiles`, by other sums. Pieces begin
    at multiples of a number of tokens that follows from the longest context there may
    be, and are walked from their beginning in steps that begin at fixed positions too;
    what a row sees nothing of leaves its sums as they are, to the bit. Each row has
    places of its own for the results of its pieces, joined from the first to the last.
    How many programs that makes is static: those for which a context is too short end
    at once.
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
    """Return the results of requests of one row; other rows are zeros and -inf."""
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
    else:  # each of the lanes would have a window of its own
        listed = _find_list(call, size(), size(is_windowed=True))
    assert isinstance(listed.sizes, DecodeSizes)
    num_lanes = listed.sizes.num_lanes
    variant = decode_variant(call, tuning, num_lanes, way=way)
    num_places = listed.sizes.num_entries * num_lanes
    return attend_pieces("jkv_decode", call, listed, variant, num_places)


def _find_list(
    call: Call,  # which makes its own where nothing was planned for it
    *sizes: ListSizes,  # of the lists that serve it
) -> WorkList:
    """Return the first that was listed with the step, else the last, for the call."""
    for each in sizes:
        listed = find_list(call, each)
        if listed is not None:
            return listed
    num_parts, part_size = call.num_parts, call.pools.block_size
    given = call.requests, sizes[-1], call.window
    return list_work(*given, num_parts=num_parts, part_size=part_size)


def prefill_rows(
    call: Call,
    variant: Variant,
    output: jax.Array,  # [R, H, Dv]
    lse: jax.Array,  # f32[R, H]
) -> tuple[jax.Array, jax.Array]:
    """Return both with the rows of requests of several rows replaced, in place."""
    sizes = size_prefill_work(call.num_rows, call.num_requests, variant.row_tokens)
    operands = make_operands(call, _find_list(call, sizes).work, variant)
    return _launch_rows(operands, output, lse, variant)


def make_operands(call: Call, work: Work, variant: Variant) -> Operands:
    """Return what the kernel reads, whole: nothing is sliced, and nothing computed.

    Each operation here would be a launch in every layer.
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
    """Return a pool as what is loaded of it, [..., D] or fewer of more bits."""
    # A tile that is carried is left as bits: on gfx942 its first one would be waited
    # for twice.
    has_view = not variant.interpret and Ways.CARRIED not in variant.tile.ways
    dtype = kept.view_of(has_words=variant.has_words, has_view=has_view)
    if dtype is None or pool.dtype == dtype:
        return pool
    if not variant.interpret:
        return backend.view_as(pool, dtype)
    groups = pool.reshape(*pool.shape[:-1], -1, dtype.itemsize)
    return jax.lax.bitcast_convert_type(groups, dtype)


def attend_pieces(
    name: str,  # of the kernel that attends, for profilers
    call: Call,  # whose sinks join with the pieces
    listed: WorkList,  # the pieces
    variant: Variant,  # of the kernel
    # of partial results; those of pieces that are not there stay as they are found
    num_places: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the results of rows whose contexts are cut into pieces, joined."""
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
    """Return both with the rows of all tiles replaced, in place."""
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
    """Return the output with rows replaced that are NaN for what others see."""
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
    """Return the shapes of an output and of a number for each of its rows."""
    return (
        jax.ShapeDtypeStruct(shape, dtype),
        jax.ShapeDtypeStruct(shape[:2], jnp.float32),
    )


def find_compilation(variant: Variant, *, is_rare: bool = False) -> backend.Compilation:
    """Return how the kernel is compiled for a variant.

    What hardly ever runs has no tiles in flight, in the registers that they take.
    """
    tile, stages = variant.tile, 1 if is_rare else variant.tile.num_stages
    return backend.Compilation(tile.num_warps, stages, variant.way)
