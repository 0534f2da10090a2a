"""Sizes of programs of verbs and loops, which only fall (`benchmarks/programs.py`)."""

import sys

import jax
import pytest
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))  # benchmarks are no package
import programs  # noqa: E402

pytestmark = pytest.mark.one_end

# StableHLO operations, and loops among them, at most. Lower them with the code.
MOST = {
    "plain": {
        "append": (330, 0),
        "allocate": (380, 1),
        "commit": (1, 0),
        "fork": (505, 2),
        "free": (405, 1),
        "truncate": (570, 2),
        "reorder": (940, 6),
        "attend": (330, 1),
        "generate": (3_660, 15),
    },
    "prefix caching": {
        "append": (565, 2),
        "allocate": (620, 3),
        "allocate, tokens": (1_600, 6),
        "commit": (1_160, 5),
        "fork": (755, 4),
        "free": (410, 1),
        "truncate": (975, 5),
        "reorder": (1_200, 8),
        "attend": (330, 1),
        "generate": (6_530, 27),
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
