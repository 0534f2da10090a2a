"""The backend of the kernels: Pallas over Triton, for CUDA and ROCm GPUs.

The only file that imports it. The kernels (`kernel_attend.py`, `kernel_join.py`) are
written with what is offered here, `jax.numpy` and loads by index; another backend with
the same few functions takes its place.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jkv.attention.kernel_tuning import Tile

MISSING: str | None = None
try:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton
except ImportError as error:  # a jaxlib that was built without it
    MISSING = f"this JAX has no Pallas backend for GPUs ({error})"


def program_id(axis: int) -> jax.Array:
    """Return the place of this program on an axis of the grid, i32[]."""
    return pl.program_id(axis)


def load(ref: Any, where: tuple[jax.Array, ...], mask: jax.Array) -> jax.Array:
    """Load elements by index arrays, zeros where the mask is false.

    Indices out of range must be brought into the array, mask or not.
    """
    return triton.load(ref.at[where], mask=mask, other=0.0)


def store(
    ref: Any, where: tuple[jax.Array, ...], value: jax.Array, mask: jax.Array
) -> None:
    """Store elements by index arrays where the mask is true.

    Indices must all differ, masked ones too: interpreting writes these back unchanged.
    """
    triton.store(ref.at[where], value, mask=mask)


def launch(
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
    """Run a kernel that writes an array of a shape and an f32 for each of its rows.

    In place, the last two operands are the arrays that it changes.
    """
    # JAX 0.11 and later say so when they lower a kernel. It is known, and the reason
    # why one file holds a backend.
    warnings.filterwarnings(
        "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
    )

    def named(*refs: Any) -> None:
        kernel(*refs)

    named.__name__ = name  # what profilers show
    whole = pl.BlockSpec(memory_space=pl.ANY)
    last = len(jax.tree.leaves(operands)) - 1
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
        compiler_params=triton.CompilerParams(
            num_warps=tile.num_warps, num_stages=tile.num_stages
        ),
        interpret=interpret,
    )(*operands)
    return output, lse
