"""What each end of the range of JAX runs.

The tests run with the oldest and with the newest JAX supported. What may differ between
the two runs on both: the verbs, the compiled modules, the loops, a case of everything.
Where there are many cases of one thing, such as the random games or the options of
attention, they are dealt out: each end plays every second one. What JAX has no part in,
such as numbers of a plan, settings that are read, bytes of a file and pages, runs on
the oldest alone, marked `one_end`.

`JKV_ALL_CASES=1` runs everything on the JAX at hand.
"""

import os

import jax

IS_NEWEST = jax.__version_info__ >= (0, 11)
ALL_CASES = bool(os.environ.get("JKV_ALL_CASES"))


def dealt(cases, turn=0):
    """Every second case; the other end plays the others."""
    cases = list(cases)
    return cases if ALL_CASES else cases[(turn + IS_NEWEST) % 2 :: 2]


def runs_here(is_marked):
    """Whether a test runs at this end, marked `one_end` or not."""
    return ALL_CASES or not (is_marked and IS_NEWEST)
