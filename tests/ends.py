"""What each end of the range of JAX runs.

The tests run with the oldest and with the newest JAX supported. What may differ between
the two runs on both: the verbs, the compiled modules, the loops, a case of everything.
Where there are many cases of one thing, such as the random games or the options of
attention, they are dealt out, so that each end plays some. What JAX has no part in
runs on the oldest alone, marked `one_end`: numbers of a plan, settings that are read,
bytes of a file, pages, examples in docstrings, what the host recounts, single cases of
a verb's bookkeeping, which the random games play on both, and further cases of a loop
or of an option that others play on both. The oldest compiles in half the time of the
newest.

`JKV_ALL_CASES=1` runs everything on the JAX at hand.
"""

import os

import jax

IS_NEWEST = jax.__version_info__ >= (0, 11)
ALL_CASES = bool(os.environ.get("JKV_ALL_CASES"))


def dealt(cases, turn=0, share=2):
    """The cases of this end: the newest plays one of `share`, the oldest the others."""
    places = range(len(cases := list(cases)))
    is_newest = [(place - turn) % share == 1 for place in places]
    return [cases[i] for i in places if ALL_CASES or is_newest[i] == IS_NEWEST]


def runs_here(is_marked):
    """Whether a test runs at this end, marked `one_end` or not."""
    return ALL_CASES or not (is_marked and IS_NEWEST)
