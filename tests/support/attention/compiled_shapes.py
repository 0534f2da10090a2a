"""Pytest plugin: interpreter-only tests, and a check of the shapes of compiled kernels.

`served_shapes` queries JAX's devices, so it is imported late: `tests/devices` sets
their number after the plugin is loaded.
"""

import pytest

from jkv.attention.kernel.tiles import tuning
from support.paths import ROOT

ATTENTION = ROOT / "tests" / "attention"


def pytest_runtest_setup(item):
    """Skip interpreter-only tests if kernels are compiled."""
    mark = item.get_closest_marker("interpreted")
    if mark is not None:
        from support.attention.served_shapes import IS_INTERPRETED

        if not IS_INTERPRETED:
            pytest.skip(f"for the interpreter alone: {mark.kwargs['reason']}")


@pytest.fixture(autouse=True)
def only_known_shapes(request, monkeypatch):
    """Fail interpreted kernels in shapes that no test has requested."""
    is_marked = request.node.get_closest_marker("interpreted") is not None
    if is_marked or ATTENTION not in request.node.path.parents:
        return
    from support.attention.served_shapes import IS_INTERPRETED, Shape, is_known

    if not IS_INTERPRETED:
        return

    def watch(name, is_derived):
        say_why = getattr(tuning, name)

        def watched(queries, pools, platform, target):
            reason = say_why(queries, pools, platform, target)
            if reason is None and platform == "cpu":
                dims = pools.head_dim, pools.value_dim
                stored = (each.dtype.name for each in pools.formats)
                shape = Shape(*dims, queries.dtype.name, *stored, is_derived)
                assert is_known(shape), (
                    f"{shape}: ask support.attention.served_shapes for it"
                )
            return reason

        monkeypatch.setattr(tuning, name, watched)

    watch("why_not", is_derived=False)
    watch("why_no_tile", is_derived=True)
