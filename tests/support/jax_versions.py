"""Which tests run with the oldest JAX supported, which with the newest, which later.

The oldest, which compiles in half the time, runs all tests but those dealt to the
newest. The newest runs the parts that may differ there, each kind of it once:

    subject of the test                              oldest  newest          marked by
    ----------------------------------------------  ------  --------------  ----------
    names and arguments of JAX: each room, public    all     one of each
      verb, example, and library of models
    XLA's results of donation, aliasing, loops,      all     one for plain,
      collectives (compiled modules)                           raw, scaled
    Pallas: lowering for each kind of operands, an   all     one of each
      interpreted call, an export
    meshes of either kind of axis, `shard_map`,      all     one of each
      several processes, kinds of memory
    tracing: promotion, weak types, 64 bits, counts  all     one of each
      of traces, pytrees, gradients, callbacks,
      errors that JAX raises
    files: exported and kept programs, pickles       all     one of each
    random games: one with prompts and a window;     the     these           `dealt`
      random options of attention                    others
    further values, options, dtypes of a program     all     chosen cases    `few`
    a verb's bookkeeping, computing on the host,     all     none            `one_end`
      errors of jkv, pages, docstrings

A test without a mark runs with both. `@pytest.mark.one_end` stands at a test, a class
or a file; examples in docstrings have it all. `few(cases, *chosen)` and `dealt(cases)`
make the cases of a parametrised test. `JKV_ALL_CASES=1` runs everything with the JAX
at hand.

`make test` should take ten minutes. Tests that take more than three seconds, and more
values of a claim with programs of their own to compile, are marked by
`@pytest.mark.further`, `further(cases)` or `with_further(cases, *others)`: the suites
of that name, added by `.ci/run`, run them with the oldest JAX.
`@pytest.mark.newest_further` does the same for the newest JAX; the oldest always runs
these. `JKV_FURTHER=1` runs further tests alone.
"""

import os

import jax
import pytest

IS_NEWEST = jax.__version_info__ >= (0, 11)
ALL_CASES = bool(os.environ.get("JKV_ALL_CASES"))
FURTHER = bool(os.environ.get("JKV_FURTHER"))


def few(cases, *chosen):
    """Return the cases of this JAX: the newest runs the chosen ones, the oldest all."""
    cases = list(cases)
    assert all(case in cases for case in chosen)
    return [*chosen] if IS_NEWEST and not ALL_CASES else cases


def dealt(cases, turn=0, share=2):
    """Return this JAX's cases: the newest runs one of `share`, the oldest the rest.

    Further cases of the newest are in its own suite of further tests.
    """
    places = range(len(cases := list(cases)))
    is_newest = [(place - turn) % share == 1 for place in places]
    own = [cases[i] for i in places if ALL_CASES or is_newest[i] == IS_NEWEST]
    return [*map(_defer, own)] if IS_NEWEST else own


def _defer(case):
    """Return a case, and a further one as `newest_further`."""
    if not any(mark.name == "further" for mark in getattr(case, "marks", ())):
        return case
    return pytest.param(*case.values, marks=pytest.mark.newest_further, id=case.id)


def further(cases):
    """Mark all cases as further ones."""
    tuples = [case if type(case) is tuple else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.further) for case in tuples]


def with_further(cases, *others):
    """Mark `others` among the cases as further ones."""
    cases = list(cases)
    assert all(other in cases for other in others)
    return [*(further([case])[0] if case in others else case for case in cases)]


def runs_here(has_one_end, is_further, is_newest_further):
    """Return True if a test with these marks runs with this JAX and suite."""
    if ALL_CASES:
        return True
    if not IS_NEWEST:
        return is_further == FURTHER
    is_now = is_newest_further if FURTHER else not (is_further or is_newest_further)
    return is_now and not has_one_end
