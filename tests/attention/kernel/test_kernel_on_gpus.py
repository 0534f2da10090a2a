"""GPU tests: the table has a tile for each shape that they use.

The suites get their shapes from `support.attention.served_shapes`;
`support.attention.compiled_shapes` fails a test that uses another one.
"""

import importlib.util
import pathlib

import pytest
from support.attention import served_shapes
from support.attention.attention_workloads import Workload, make_operands
from support.attention.served_shapes import (
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
# Suites that fit their shapes at import.
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
    """Return the shapes that a suite requests."""
    monkeypatch.setattr(served_shapes, "FITTED", fitted := set())
    monkeypatch.syspath_prepend(path.parent)  # suites share modules of their folder
    spec = importlib.util.spec_from_file_location(f"{path.stem}_again", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return fitted


@pytest.mark.interpreted(reason="it asks for cards that are not here")
@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_every_shape_has_a_tile(path, monkeypatch):
    """If the shape itself has none, a similar one with the same kind of storage has."""
    fitted = load_shapes(path, monkeypatch)
    assert fitted
    for target in TARGETS:
        device = name_card(target)
        for shape in fitted:
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
def test_8_bit_pools_have_a_derivative_on_one_family(dtype):
    """On other GPUs the plain path differentiates them, and the test is skipped."""
    shape = Shape(48, 32, "float32", dtype, dtype, is_derived=True)
    served = [t for t in TARGETS if why_unserved(shape, name_card(t)) is None]
    assert served == ["gfx942"]


def test_a_gpu_without_tiles_is_reported(monkeypatch):
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
    with pytest.raises(
        AssertionError, match="ask support.attention.served_shapes for it"
    ):
        paged_attention(*call, implementation="pallas")
