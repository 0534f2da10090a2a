"""Choose shapes that the current GPU has a tile for.

The interpreter has a tile for any shape. Kernel tests get their shape from `fit`: the
shape itself if the GPU has a tile for it, else wider or narrower heads, else 16-bit
floats for float32. `JKV_SHAPES_OF=gfx1100` interprets the shapes of an absent GPU. A
test that needs one exact shape calls `require`; a test that cannot run compiled is
marked `interpreted`, with the reason.
"""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from jkv.attention.backend import DeviceType, find_gpu
from jkv.attention.kernel.tiles.table import INTERPRETED, Tuning
from jkv.attention.kernel.tiles.tuning import find_tuning, why_no_tile, why_not
from support.attention.kernel_lowering import make_shapes

_INTERPRETED = DeviceType("cpu", None)


def name_card(target: str) -> DeviceType:
    """Return the device type of a target such as gfx942 or sm_90."""
    return DeviceType("rocm" if target.startswith("gfx") else "cuda", target)


NAMED = os.environ.get("JKV_SHAPES_OF")
IS_INTERPRETED = find_gpu() is None
CARD = find_gpu() or (name_card(NAMED) if NAMED else _INTERPRETED)


class Shape(NamedTuple):
    """Sizes and dtypes that select a tile."""

    head_dim: int = 16
    value_dim: int = 16
    queries: str = "float32"
    keys: str = "float32"
    values: str = "float32"
    is_derived: bool = False  # the call is also differentiated


# Shapes of this process's tests, and shapes without a substitute.
FITTED: set[Shape] = set()
REQUIRED: set[Shape] = set()


def fit(shape: Shape) -> Shape:
    """Return the nearest shape that the current GPU serves."""
    found = find_fit(shape, CARD)
    if found is None:
        raise LookupError(f"{CARD.target} has no tile for {shape} nor for one like it")
    FITTED.add(found)
    return found


def require(shape: Shape) -> None:
    """Skip the test if the current GPU has no tile for the shape."""
    if reason := why_unserved(shape, CARD):
        pytest.skip(reason)
    REQUIRED.add(shape)


def is_served(shape: Shape) -> bool:
    """Return True if the current GPU has a tile for a randomly drawn shape."""
    REQUIRED.add(shape)
    return why_unserved(shape, CARD) is None


def is_known(shape: Shape) -> bool:
    """Return True if a test has requested a shape or its derivative."""
    return bool({shape, shape._replace(is_derived=True)} & (FITTED | REQUIRED))


def find_tuning_here(shape: Shape) -> Tuning:
    """Return the tuning for a fitted shape on the current device."""
    if IS_INTERPRETED:
        return INTERPRETED
    tuning = find_tuning(*_make_operands(shape), *CARD)
    assert tuning is not None
    return tuning


def find_fit(shape: Shape, device: DeviceType) -> Shape | None:
    """Return the nearest shape that a GPU serves, or None."""
    return next(
        (each for each in _vary(shape) if why_unserved(each, device) is None), None
    )


def why_unserved(shape: Shape, device: DeviceType) -> str | None:
    """Return the reason why a GPU has no tile for a shape, or None."""
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
