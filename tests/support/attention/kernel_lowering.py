"""Lower programs for absent GPUs, and extract their kernels."""

import contextlib
import dataclasses
import hashlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.triton import dialect

from jkv.attention.backend import Call, Cotangents, Pools, Requests
from jkv.attention.kernel.backend import Way
from jkv.attention.kernel.launches.attention import attend_kernel
from jkv.attention.kernel.launches.derivative import differentiate_kernel
from jkv.attention.kernel.tiles.variant import (
    count_decode_pieces,
    count_lanes,
    cut_rows,
)
from jkv.attention.kernel.work.cutting import (
    list_decode_work,
    list_position_work,
    size_decode_work,
    size_position_work,
)
from jkv.attention.shared_prefixes import find_shared_prefixes
from jkv.formats.format import Formats
from jkv.formats.table import FORMATS

# JAX needs the name of a GPU. These are tuned like unknown ones.
_ANY_DEVICE = {"rocm": "gfx1100", "cuda": "NVIDIA H200"}

PALLAS = Way()


def written_for(platform):
    """Return the `Way` that uses jkv's own lowering."""
    return Way(written_for=platform)


class Kernel(NamedTuple):
    """One custom call: the Triton module and its launch parameters."""

    name: str
    text: str  # the module in generic form, which other builds of Triton parse
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int

    @property
    def digest(self) -> str:
        """Digest of all that a compiler reads."""
        source = f"{self.num_warps} {self.num_stages} {self.text}"
        return hashlib.sha256(source.encode()).hexdigest()[:16]


def pretend(platform):
    """Return a context in which JAX lowers Pallas kernels for an absent GPU."""
    if jax.__version_info__ < (0, 11) or platform not in _ANY_DEVICE:
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(_ANY_DEVICE[platform], 1, platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def mesh_of_cards(platform, axes, axis_type):
    """Return an abstract mesh of GPUs with the given axis names and sizes."""
    from jax.sharding import AbstractDevice, AbstractMesh

    options = {}
    if jax.__version_info__ >= (0, 11):
        device = AbstractDevice(_ANY_DEVICE[platform], 1, platform)
        options = {"abstract_device": device}
    types = (axis_type,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types, **options)


def lower(function, arguments, platform):
    """Trace and lower `function(*arguments)` for "rocm" or "cuda"."""
    with pretend(platform):
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=(platform,))


def shape(*sizes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def make_shapes(
    head_dim=128,
    *,
    value_dim=None,
    group=4,
    kv_heads=8,
    blocks=64,
    block_size=16,
    dtype="bfloat16",
    kv_dtype=None,
    value_dtype=None,
    num_layers=2,
    rows=64,
    has_bits=True,
):
    """Return shapes of queries and pools; head dims above 256 mean a latent cache."""
    is_latent = head_dim > 256
    kv_heads = 1 if is_latent else kv_heads
    kv_dtype = jnp.dtype(kv_dtype or dtype)
    formats = Formats(FORMATS[kv_dtype], FORMATS[jnp.dtype(value_dtype or kv_dtype)])
    value_dim = value_dim or (head_dim - 64 if is_latent else head_dim)
    if is_latent and formats.key.is_turned:
        value_dim = head_dim
    common = (num_layers, blocks, kv_heads, block_size)

    def arrays(kept, width):
        found = kept.arrays(width)
        pool = shape(*common, *found["pool"].shape, dtype=found["pool"].dtype)
        if not has_bits:
            pool = shape(*pool.shape, dtype=kept.dtype)
        return pool, shape(*common, dtype=jnp.uint16) if "scales" in found else None

    keys, key_scales = arrays(formats.key, head_dim)
    values, value_scales = arrays(formats.value, value_dim)
    pools = Pools(
        keys=keys,
        values=None if is_latent else values,
        key_scales=key_scales,
        value_scales=None if is_latent else value_scales,
        head_dim=head_dim,
        value_dim=value_dim,
        formats=formats,
    )
    return shape(rows, kv_heads * group, head_dim, dtype=dtype), pools


def lower_kernels(
    queries,
    pools,
    tuning,
    platform,
    *,
    by_position=False,
    has_lanes=False,
    way=PALLAS,
    **options,
):
    """Lower the kernel's own call, for the shapes in the options."""
    call = make_call(queries, pools, **options)
    call = dataclasses.replace(call, by_position=by_position)

    def attend(call):
        if has_lanes:
            call = dataclasses.replace(call, plans=plan_lanes(call, tuning))
        return attend_kernel(call, tuning=tuning, way=way)

    return lower(attend, (call,), platform)


def plan_lanes(call, tuning):
    """Plan the work lists of a step if requests may share blocks."""
    max_tokens = call.max_blocks * call.pools.block_size
    of_decode = size_decode_work(
        call.num_rows,
        call.num_requests,
        max_tokens,
        count_decode_pieces(call.pools.num_kv_heads, call.heads_per_kv, tuning),
        num_lanes=count_lanes(call.heads_per_kv, tuning),
    )
    sizes = size_position_work(
        call.num_rows,
        call.num_requests,
        max_tokens,
        cut_rows(call.heads_per_kv, tuning.position_tile(None))[1],
        piece_tokens=tuning.piece_tokens,
        max_pieces=tuning.max_pieces,
    )
    counts = jnp.zeros(call.pools.keys.shape[1], jnp.int32)
    size = call.pools.block_size
    shared = find_shared_prefixes(
        call.requests, counts, block_size=size, has_branches=False
    )
    given = {"part_size": size, "shared": shared}
    decode = list_decode_work(call.requests, None, of_decode, **given)
    listed = list_position_work(call.requests, sizes, **given)
    return {"pallas": (decode, listed)}


def lower_derivative(queries, pools, tuning, platform, *, way=PALLAS, **options):
    """Lower the kernels of a call's derivative, for the shapes in the options."""
    call = make_call(queries, pools, **options)
    output, lse = call.results

    def differentiate(call, cotangents):
        return differentiate_kernel(call, cotangents, tuning=tuning, way=way)

    return lower(differentiate, (call, Cotangents(output, lse, lse)), platform)


def make_call(queries, pools, *, soft_cap=None, max_query_length=None, **arrays):
    """Return a call of shapes: 32 requests of up to 512 blocks."""
    return Call(
        queries=queries,
        pools=pools,
        layer=shape(),
        requests=Requests(shape(32, 512), *(shape(32) for _ in range(4))),
        scale=shape(dtype=jnp.float32),
        window=arrays.get("window"),
        sinks=arrays.get("sinks"),
        past=arrays.get("past"),
        soft_cap=soft_cap,
        max_query_length=max_query_length,
    )


def find_kernels(lowered):
    """Return all Pallas Triton kernels of a lowered program."""
    found = []

    def visit(operation):
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target == "__gpu$xla.gpu.triton":
                config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
                found.append(_read_kernel(config))
        for region in operation.regions:
            for block in region:
                for inner in block:
                    visit(inner.operation)

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        visit(module.operation)
    return found


def _read_kernel(config):
    def number(key):
        return ir.IntegerAttr(config[key]).value

    code = ir.StringAttr(config["ir"]).value_bytes
    with ir.Context() as context, ir.Location.unknown():
        dialect.register_dialect(context)
        context.load_all_available_dialects()
        context.allow_unregistered_dialects = True
        text = ir.Module.parse(code).operation.get_asm(
            enable_debug_info=False, print_generic_op_form=True
        )
    # Operations of an unregistered dialect are printed in a form that no parser
    # accepts.
    text = re.sub(r'("gpu.barrier"\(\)) <.*> (: \(\) -> \(\))', r"\1 \2", text)
    return Kernel(
        name=ir.StringAttr(config["name"]).value,
        text=text,
        grid=(number("grid_x"), number("grid_y"), number("grid_z")),
        num_warps=number("num_warps"),
        num_stages=number("num_stages"),
    )
