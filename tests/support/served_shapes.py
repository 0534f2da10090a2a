"""Shapes that have a tile on the GPU at hand, for tests that run compiled there.

Interpreted on a CPU, any shape has one. Tests of the kernel ask `fit` for theirs: the
shape itself where the GPU has a tile for it, else wider or narrower heads, else 16-bit
floats for float32. `JKV_SHAPES_OF=gfx1100` interprets the shapes of a GPU that is not
there. A test that needs one shape and no other calls `require`, and one that cannot run
compiled is marked `interpreted`, with the reason.
"""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from jkv.attention.backend import DeviceType, find_gpu
from jkv.attention.kernel.tiles.table import INTERPRETED, Tuning
from jkv.attention.kernel.tiles.tuning import find_tuning, why_no_tile, why_not
from support.kernel_lowering import make_shapes

_INTERPRETED = DeviceType("cpu", None)


def name_card(target: str) -> DeviceType:
    """Return the GPU of a target, such as gfx942 or sm_90."""
    return DeviceType("rocm" if target.startswith("gfx") else "cuda", target)


NAMED = os.environ.get("JKV_SHAPES_OF")
IS_INTERPRETED = find_gpu() is None
CARD = find_gpu() or (name_card(NAMED) if NAMED else _INTERPRETED)


class Shape(NamedTuple):
    """Sizes and dtypes by which the table chooses tiles."""

    head_dim: int = 16
    value_dim: int = 16
    queries: str = "float32"
    keys: str = "float32"
    values: str = "float32"
    is_derived: bool = False  # a call that is differentiated, too


# Calls of this process's tests, and calls that nothing else stands for.
FITTED: set[Shape] = set()
REQUIRED: set[Shape] = set()


def fit(shape: Shape) -> Shape:
    """Return the nearest shape that the GPU at hand serves."""
    found = find_fit(shape, CARD)
    if found is None:
        raise LookupError(f"{CARD.target} has no tile for {shape} nor for one like it")
    FITTED.add(found)
    return found


def require(shape: Shape) -> None:
    """Skip the test where the GPU at hand leaves the shape to the plain path."""
    if reason := why_unserved(shape, CARD):
        pytest.skip(reason)
    REQUIRED.add(shape)


def is_served(shape: Shape) -> bool:
    """Return whether the GPU at hand has a tile for a shape that was drawn."""
    REQUIRED.add(shape)
    return why_unserved(shape, CARD) is None


def is_known(shape: Shape) -> bool:
    """Return True if a test has requested a shape, or its derivative, too."""
    return bool({shape, shape._replace(is_derived=True)} & (FITTED | REQUIRED))


def find_tuning_here(shape: Shape) -> Tuning:
    """Return how calls of a fitted shape are cut where the tests run."""
    if IS_INTERPRETED:
        return INTERPRETED
    tuning = find_tuning(*_make_operands(shape), *CARD)
    assert tuning is not None
    return tuning


def find_fit(shape: Shape, device: DeviceType) -> Shape | None:
    """Return the nearest shape that a GPU serves, None if there is none."""
    return next(
        (each for each in _vary(shape) if why_unserved(each, device) is None), None
    )


def why_unserved(shape: Shape, device: DeviceType) -> str | None:
    """Say why a GPU has no tile for a shape, None if it has."""
    queries, pools = _make_operands(shape)
    reason = why_not(queries, pools, *device)
    if reason is None and shape.is_derived:
        reason = why_no_tile(queries, pools, *device)
    return reason


def _make_operands(shape: Shape) -> tuple[Any, Any]:
    return make_shapes(
        shape.head_dim,
        value_dim=shape.value_dim,
        dtype=shape.queries,
        kv_dtype=shape.keys,
        value_dtype=shape.values,
    )


def _vary(shape: Shape) -> Iterator[Shape]:
    for floats in ("float32", "float16", "bfloat16"):
        dtypes = [
            floats if dtype == "float32" else dtype
            for dtype in (shape.queries, shape.keys, shape.values)
        ]
        for factor in (1, 2, 4, 1 / 2, 1 / 4):
            dims = int(shape.head_dim * factor), int(shape.value_dim * factor)
            yield Shape(*dims, *dtypes, shape.is_derived)
