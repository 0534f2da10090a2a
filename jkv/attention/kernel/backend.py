"""The backend of the kernels: Pallas, which traces and interprets them.

The only file that imports it. What is traced becomes Triton's IR by Pallas' lowering
or by jkv's own (`triton/`). The kernels (`bodies/`) are written with what is
offered here, `jax.numpy` and loads by index; another backend with the same few
functions could replace it.
"""

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jkv.sharding.loops import is_manual, type_alike, unvarying, vary_over, varying_axes

Results = TypeVar("Results")


@functools.cache
def _pallas() -> ModuleType:
    """Import Pallas when a kernel first needs it.

    That takes a third of a second, and a program for CPUs never does.
    """
    from jax.experimental import pallas

    from jkv.xla_flags import warn_of_missing_flags

    warn_of_missing_flags()
    return pallas


def _lowering() -> ModuleType:
    """Import Pallas' lowering to Triton.

    JAX 0.11 and later say that it is deprecated when they lower a kernel. It is known:
    it is used in one file, and there is another.
    """
    from jax.experimental.pallas import triton

    warnings.filterwarnings(
        "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
    )
    return triton


def _access(name: str) -> Callable[..., Any]:
    """Return Pallas' masked `load` or `store`, public beside that lowering alone."""
    try:
        return getattr(_lowering(), name)
    except ImportError:
        from jax._src.pallas import primitives

        access = getattr(primitives, name)
        return lambda ref, *value, **options: access(ref, None, *value, **options)


def why_missing() -> str | None:
    """Say why this JAX does not lower kernels, None if it does; imports Pallas."""
    try:
        _pallas(), _lowering()
    except ImportError as error:  # a jaxlib that was built without it
        return f"this JAX has no Pallas backend for GPUs ({error})"
    return None


def program_id(axis: int) -> jax.Array:
    """Return the index of this program on an axis of the grid, i32[]."""
    index: jax.Array = _pallas().program_id(axis)
    return index


def load_masked(ref: Any, where: tuple[jax.Array, ...], mask: jax.Array) -> jax.Array:
    """Load elements by index arrays, zeros where the mask is false.

    Indices out of range must be brought into the array, mask or not.
    """
    loaded: jax.Array = _access("load")(ref.at[where], mask=mask, other=0.0)
    return loaded


def store_masked(
    ref: Any, where: tuple[jax.Array, ...], value: jax.Array, mask: jax.Array
) -> None:
    """Store elements by index arrays where the mask is true.

    Indices must all differ, masked ones too: interpreting writes these back unchanged.
    """
    _access("store")(ref.at[where], value, mask=mask)


class Way(NamedTuple):
    """How kernels become programs."""

    interpret: bool = False  # operation by operation, on any platform
    # For which platform jkv itself writes them in Triton's IR; None: Pallas does.
    written_for: str | None = None


class Compilation(NamedTuple):
    """How a kernel is compiled."""

    num_warps: int  # of a program
    num_stages: int  # of the pipeline that the compiler makes of its loop
    way: Way


def launch(
    name: str,  # what profilers show
    # takes the operands as refs, and the refs of the results
    kernel: Callable[..., None],
    operands: tuple[Any, ...],  # a pytree of arrays, passed whole
    results: tuple[Any, ...],  # a tuple of shapes and dtypes; None in it stays None
    *,
    grid: tuple[int, int],  # how many programs there are on each axis
    compilation: Compilation,
    in_place: bool = False,  # whether the last operands are the arrays that it changes
) -> Any:
    """Run a kernel that writes arrays; return them, as the results are given."""
    pl, way = _pallas(), compilation.way
    leaves, structure = jax.tree.flatten(operands)
    shapes, result_structure = jax.tree.flatten(results)
    whole = pl.BlockSpec(memory_space=pl.ANY)

    def body(*refs: Any) -> None:
        inputs = jax.tree.unflatten(structure, refs[: len(leaves)])
        outputs = jax.tree.unflatten(result_structure, refs[len(leaves) :])
        kernel(*inputs, *outputs)

    body.__name__ = name
    if is_manual():
        shapes = list(map(unvarying, shapes))
    changed = range(len(leaves) - len(shapes), len(leaves)) if in_place else ()
    aliases = {number: index for index, number in enumerate(changed)}
    stages, warps = compilation.num_stages, compilation.num_warps
    numbers = {"num_stages": stages, "num_warps": warps}
    call = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[whole] * len(leaves),
        out_specs=[whole] * len(shapes),
        out_shape=shapes,
        input_output_aliases=aliases,
        interpret=way.interpret,
        compiler_params=_lowering().CompilerParams(**numbers) if way == Way() else None,
    )
    if way.written_for is not None:
        from jkv.attention.kernel.triton.call import TARGET, write_module

        numbers |= {"grid_x": grid[0], "grid_y": grid[1], "grid_z": 1}
        call = functools.partial(
            jax.ffi.ffi_call(TARGET, shapes, input_output_aliases=aliases),
            name=name,
            ir=write_module(name, call, leaves, way.written_for, grid),
            debug=False,
            **{key: np.int32(number) for key, number in numbers.items()},
        )
    return jax.tree.unflatten(result_structure, call(*leaves))


def defer(
    function: Callable[..., Results],
    operands: tuple[Any, ...],
    results: Any,  # its results' shapes and dtypes
    way: Way,
) -> Results:
    """Return `function(*operands)`, traced only where it is lowered for a GPU.

    A Pallas call cannot be lowered for CPU, not even where a program for several
    platforms never gets to it; and lowering all branches for all platforms is what
    `platform_dependent` does in such a program. So what launches kernels is a primitive
    of its own, which other platforms lower to zeros that are not used. Where no GPU is
    meant, nothing of it is ever traced.

    Inside `shard_map`, where Pallas takes nothing that varies over a mesh, the function
    is traced for one device alone. What is interpreted there is lowered everywhere;
    elsewhere it is traced at once.
    """
    if is_manual():
        operands = vary_over(operands, varying_axes(operands))
    elif way.interpret:
        return function(*operands)
    leaves, structure = jax.tree.flatten(operands)
    shapes, result_structure = jax.tree.flatten(results)

    def call(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))

    primitive = _interpreted if way.interpret else _deferred
    found = primitive.bind(*leaves, call=call, results=tuple(shapes))
    deferred: Results = jax.tree.unflatten(result_structure, found)
    return deferred


def view_as(array: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return an array of raw bits as the numbers they mean, for kernels alone.

    Of wider numbers there are fewer in a row.

    A kernel is told where an array lies and what its elements are, so nothing is done,
    and nothing copied as by `bitcast_convert_type`. A tile that is loaded as bits goes
    through registers to be numbers, and back, before Hopper multiplies it.
    """
    viewed: jax.Array = _view.bind(array, dtype=jnp.dtype(dtype))
    return viewed


_view = Primitive("jkv_view")


def _find_view(array: Any, dtype: Any) -> Any:
    *others, columns = array.shape
    columns = columns * array.dtype.itemsize // dtype.itemsize
    return jax.core.ShapedArray((*others, columns), dtype)


_view.def_abstract_eval(_find_view)


def _lower_view(_ctx: Any, array: Any, *, dtype: Any) -> Any:
    """Give the operand itself, to a call that passes on where it lies."""
    del dtype
    return [array]


mlir.register_lowering(_view, _lower_view)

_deferred = Primitive("jkv_deferred")
_interpreted = Primitive("jkv_interpreted")
_deferred.multiple_results = _interpreted.multiple_results = True


def _run(*leaves: jax.Array, call: Callable[..., Any], results: Any) -> Any:
    del results
    return call(*leaves)


def _find_types(*leaves: Any, results: Any, **params: Any) -> Any:
    del params
    # All leaves vary over the same axes of a mesh, and so do the results.
    more = type_alike(leaves[0]) if leaves else {}
    return [
        jax.core.ShapedArray(result.shape, result.dtype, **more) for result in results
    ]


def _lower(ctx: Any, *leaves: Any, call: Callable[..., Any], results: Any) -> Any:
    del results
    alone = ctx.replace(
        avals_in=list(map(unvarying, ctx.avals_in)),
        avals_out=list(map(unvarying, ctx.avals_out)),
    )
    return mlir.lower_fun(call)(alone, *leaves)


def _lower_unused(ctx: Any, *leaves: Any, call: Any, results: Any) -> Any:
    del call

    def zeros(*leaves: jax.Array) -> list[jax.Array]:
        del leaves
        return [jnp.zeros(result.shape, result.dtype) for result in results]

    return _lower(ctx, *leaves, call=zeros, results=results)


def _batch(leaves: Any, axes: Any, *, call: Callable[..., Any], results: Any) -> Any:
    """One call after the other: `vmap` is for completeness here."""
    mapped = [isinstance(axis, int) for axis in axes]
    moved = [
        jnp.moveaxis(leaf, axis, 0) if is_mapped else leaf
        for leaf, axis, is_mapped in zip(leaves, axes, mapped, strict=True)
    ]
    xs = [leaf for leaf, is_mapped in zip(moved, mapped, strict=True) if is_mapped]

    def call_one(xs: list[jax.Array]) -> Any:
        rest = iter(xs)
        pairs = zip(moved, mapped, strict=True)
        one = [next(rest) if is_mapped else leaf for leaf, is_mapped in pairs]
        return _deferred.bind(*one, call=call, results=results)

    outputs = jax.lax.map(call_one, xs)
    return outputs, [0] * len(outputs)


_deferred.def_impl(_run)
_deferred.def_abstract_eval(_find_types)
_interpreted.def_impl(_run)
_interpreted.def_abstract_eval(_find_types)
mlir.register_lowering(_deferred, _lower_unused)
mlir.register_lowering(_interpreted, _lower)


for _platform in ("rocm", "cuda"):
    mlir.register_lowering(_deferred, _lower, platform=_platform)


def _refuse_derivative(*_operands: Any, **_params: Any) -> Any:
    raise NotImplementedError(
        "kernels have no second derivative of attention (jax.hessian, or jax.jvp of "
        'jax.grad): the model must call attend(..., implementation="xla"), which has'
    )


batching.primitive_batchers[_deferred] = _batch
for _primitive in (_deferred, _interpreted):
    ad.primitive_jvps[_primitive] = _refuse_derivative
