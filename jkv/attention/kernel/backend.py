"""The interface of the kernels to Pallas, which traces and interprets them.

The only module that imports Pallas. Traced kernels are lowered to Triton's IR by Pallas
or by jkv (`triton/`). The kernels (`bodies/`) use only the functions of this module,
`jax.numpy` and indexed loads, so another backend could replace it.
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

from jkv.operations import is_manual, type_alike, unvarying, vary_over, varying_axes

Results = TypeVar("Results")


@functools.cache
def _pallas() -> ModuleType:
    """Import Pallas on first use, which takes a third of a second."""
    from jax.experimental import pallas

    from jkv.xla_flags import warn_of_missing_flags

    warn_of_missing_flags()
    return pallas


def _lowering() -> ModuleType:
    """Import Pallas' lowering to Triton, without its deprecation warning.

    JAX 0.11 and later warn of it when they lower a kernel; `triton/` replaces it.
    """
    from jax.experimental.pallas import triton

    warnings.filterwarnings(
        "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
    )
    return triton


def _access(name: str) -> Callable[..., Any]:
    """Return Pallas' masked `load` or `store`, public only in the Triton lowering."""
    try:
        return getattr(_lowering(), name)
    except ImportError:
        from jax._src.pallas import primitives

        access = getattr(primitives, name)
        return lambda ref, *value, **options: access(ref, None, *value, **options)


def why_missing() -> str | None:
    """Return the reason JAX cannot lower kernels, None if it can; imports Pallas."""
    try:
        _pallas(), _lowering()
    except ImportError as error:  # a jaxlib built without it
        return f"this JAX has no Pallas backend for GPUs ({error})"
    return None


def program_id(axis: int) -> jax.Array:
    """Return the index of this program on an axis of the grid, i32[]."""
    index: jax.Array = _pallas().program_id(axis)
    return index


def load_masked(ref: Any, where: tuple[jax.Array, ...], mask: jax.Array) -> jax.Array:
    """Load elements by index arrays, zeros where the mask is false.

    Masked indices must be in range, too.
    """
    loaded: jax.Array = _access("load")(ref.at[where], mask=mask, other=0.0)
    return loaded


def store_masked(
    ref: Any, where: tuple[jax.Array, ...], value: jax.Array, mask: jax.Array
) -> None:
    """Store elements by index arrays where the mask is true.

    All indices must be distinct, masked ones too: interpret mode writes back their old
    values.
    """
    _access("store")(ref.at[where], value, mask=mask)


class Way(NamedTuple):
    """The lowering of kernels."""

    interpret: bool = False  # interpret mode, on any platform
    # Platform of jkv's own lowering to Triton; None: Pallas' lowering.
    written_for: str | None = None


class Compilation(NamedTuple):
    """Compilation parameters of a kernel."""

    num_warps: int  # of a program
    num_stages: int  # of the software pipeline of a loop
    way: Way


def launch(
    name: str,  # shown in profilers
    # called with refs of the operands, then of the results
    kernel: Callable[..., None],
    operands: tuple[Any, ...],  # a pytree of arrays, passed without blocking
    results: tuple[Any, ...],  # shapes and dtypes; None stays None
    *,
    grid: tuple[int, int],  # programs per axis
    compilation: Compilation,
    in_place: bool = False,  # the last operands are aliased to the results
) -> Any:
    """Launch a kernel and return its results."""
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
    results: Any,  # shapes and dtypes of the results
    way: Way,
) -> Results:
    """Return `function(*operands)`, traced only when it is lowered for a GPU.

    A Pallas call cannot be lowered for CPU, not even in the unused branch of
    `platform_dependent` in a program for several platforms. So launches are wrapped in
    a primitive that other platforms lower to unused zeros without tracing.

    Inside `shard_map`, where Pallas rejects operands that vary over a mesh, it is
    traced as for one device. In interpret mode it is lowered for every platform
    there, and traced immediately elsewhere.
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
    """Return an array of raw bits as another dtype, for operands of kernels only.

    A wider dtype has fewer elements per row.

    The array itself is passed on, without the copy of `bitcast_convert_type`. Hopper
    multiplies the loaded tile directly, while a tile bitcast in the kernel would pass
    through registers first.
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
    """Return the operand itself, as calls pass pointers on."""
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
    # The operands vary over the same mesh axes, and so do the results.
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
    """Call once per element of the mapped axis; vmap over kernels is rare."""
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
        'jax.grad); call attend(..., implementation="xla") in the model, which has one'
    )


batching.primitive_batchers[_deferred] = _batch
for _primitive in (_deferred, _interpreted):
    ad.primitive_jvps[_primitive] = _refuse_derivative
