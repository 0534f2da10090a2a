"""Lowering programs for GPUs that are not there, and taking the kernels out of them."""

import contextlib
from typing import NamedTuple

import jax
from jaxlib.mlir import ir
from jaxlib.triton import dialect

# What `AbstractDevice` wants to know of a platform when no card is named.
_ANY_DEVICE = {"rocm": "gfx942", "cuda": "NVIDIA H200"}


class Kernel(NamedTuple):
    """One custom call: the Triton module and how it is launched."""

    name: str
    text: str  # the module in generic form, which other builds of Triton read
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int


def pretend(platform):
    """A context in which JAX lowers Pallas kernels for a GPU without having one."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(_ANY_DEVICE[platform], 1, platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def lower(function, arguments, platform):
    """Trace and lower `function(*arguments)` for "rocm" or "cuda"."""
    with pretend(platform):
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=(platform,))


def find_kernels(lowered):
    """Return every Pallas Triton kernel of a lowered program."""
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
    return Kernel(
        name=ir.StringAttr(config["name"]).value,
        text=text,
        grid=(number("grid_x"), number("grid_y"), number("grid_z")),
        num_warps=number("num_warps"),
        num_stages=number("num_stages"),
    )
