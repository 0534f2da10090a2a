"""Tests that run compiled on a GPU: the table has a tile for each of their shapes.

Their suites ask `support.served_shapes`; by `support.compiled_shapes` a test calls
the kernel in no other shape.
"""

import importlib.util
import pathlib

import pytest
from support import served_shapes
from support.attention_workloads import Workload, make_operands
from support.served_shapes import (
    IS_INTERPRETED,
    Shape,
    find_fit,
    fit,
    name_card,
    why_unserved,
)

from jkv.attention import paged_attention

pytestmark = pytest.mark.one_end

HERE = pathlib.Path(__file__).parent
# Suites that fit the shapes of their tests where they are loaded.
SUITES = [
    HERE / "test_pallas.py",
    HERE / "test_kernel_by_position.py",
    HERE / "test_kernel_conversion.py",
    HERE / "test_kernel_derivative.py",
    HERE / "test_kernel_isolation.py",
    HERE.parent / "test_attention.py",
    HERE.parent / "test_shared_prefixes.py",
]
TARGETS = "sm_90", "gfx942", "gfx1100", "gfx1201"


def load_shapes(path, monkeypatch):
    """The shapes that a suite asks for."""
    monkeypatch.setattr(served_shapes, "FITTED", asked := set())
    monkeypatch.syspath_prepend(path.parent)  # suites share the modules of their folder
    spec = importlib.util.spec_from_file_location(f"{path.stem}_again", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return asked


@pytest.mark.interpreted(reason="it asks for cards that are not here")
@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_every_shape_has_a_tile(path, monkeypatch):
    """Where it has none itself one like it has, of the same kind of storage."""
    asked = load_shapes(path, monkeypatch)
    assert asked
    for target in TARGETS:
        device = name_card(target)
        for shape in asked:
            found = find_fit(shape, device)
            assert found is not None and why_unserved(found, device) is None, shape
            for one, other in zip(found[2:5], shape[2:5], strict=True):
                assert one == other or other == "float32"


@pytest.mark.parametrize(
    "shape, target, expected",
    [
        (Shape(), "sm_90", Shape()),
        (Shape(is_derived=True), "sm_90", Shape(32, 32, is_derived=True)),
        (
            Shape(keys="int8", values="int8"),
            "sm_90",
            Shape(32, 32, "float32", *2 * ["int8"]),
        ),
        (Shape(48, 32), "gfx1100", Shape(48, 32, *3 * ["float16"])),
        (
            Shape(576, 512, *3 * ["bfloat16"]),
            "gfx1201",
            Shape(144, 128, *3 * ["bfloat16"]),
        ),
        (
            Shape(576, 512, *3 * ["bfloat16"]),
            "gfx942",
            Shape(576, 512, *3 * ["bfloat16"]),
        ),
        (Shape(), "gfx906", None),
    ],
    ids=str,
)
def test_fit_returns_the_nearest_supported_shape(shape, target, expected):
    assert find_fit(shape, name_card(target)) == expected


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_bytes_have_a_derivative_on_one_family(dtype):
    """Elsewhere the plain path differentiates them, and the test is skipped."""
    shape = Shape(48, 32, "float32", dtype, dtype, is_derived=True)
    served = [t for t in TARGETS if why_unserved(shape, name_card(t)) is None]
    assert served == ["gfx942"]


def test_a_gpu_without_tiles_is_named(monkeypatch):
    monkeypatch.setattr(served_shapes, "CARD", name_card("gfx906"))
    with pytest.raises(LookupError, match="gfx906 has no tile for Shape"):
        fit(Shape())


@pytest.mark.skipif(not IS_INTERPRETED, reason="a card has no tile for some shapes")
def test_an_unregistered_shape_is_refused():
    sizes = {"query_lengths": (1,), "context_lengths": (4,), "head_dim": 200}
    operands = make_operands(Workload(name="wide", num_layers=1, **sizes))
    tables, *lengths = operands[3:7]
    pools = operands.key_pool, operands.value_pool
    call = operands.queries[0], *pools, 0, tables, None, *lengths
    with pytest.raises(AssertionError, match="ask support.served_shapes for it"):
        paged_attention(*call, implementation="pallas")
