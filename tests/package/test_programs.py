"""Sizes of the programs of verbs and loops, which may only fall."""

import sys

import jax
import pytest
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))  # benchmarks are not a package
import programs  # noqa: E402

pytestmark = pytest.mark.one_end

# Maximum StableHLO operations, and loops among them. Lower them with the code.
MOST = {
    "plain": {
        "append": (325, 0),
        "allocate": (375, 1),
        "commit": (1, 0),
        "fork": (500, 2),
        "free": (390, 1),
        "truncate": (560, 2),
        "reorder": (930, 6),
        "attend": (325, 1),
        "generate": (3_265, 9),
    },
    "prefix caching": {
        "append": (480, 1),
        "allocate": (540, 2),
        "allocate, tokens": (1_470, 4),
        "commit": (1_020, 3),
        "fork": (675, 3),
        "free": (395, 1),
        "truncate": (885, 4),
        "reorder": (1_110, 7),
        "attend": (325, 1),
        "generate": (5_800, 17),
    },
}


@pytest.mark.parametrize("kind", MOST)
def test_programs_do_not_grow(kind):
    found = {}
    made = programs.make_verbs(kind) | {"generate": programs.make_loop(kind)}
    for name, (function, arguments) in made.items():
        text = jax.jit(function).lower(*arguments).as_text()
        loops = text.count("stablehlo.while")
        found[name] = programs.count_operations(text), loops
    too_large = {
        name: (found[name], most)
        for name, most in MOST[kind].items()
        if any(number > limit for number, limit in zip(found[name], most, strict=True))
    }
    assert found.keys() == MOST[kind].keys() and not too_large


def test_operations_are_counted_by_line():
    def add(x):
        return x + 1

    text = jax.jit(add).lower(jax.ShapeDtypeStruct((3,), "int32")).as_text()
    assert programs.count_operations(text) == 3  # a constant, its broadcast, the sum
