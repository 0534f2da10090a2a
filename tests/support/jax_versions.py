"""What each end of the range of JAX runs.

The tests run with the oldest and with the newest JAX supported. The oldest, which
compiles in half the time, runs everything; the newest runs what may differ there, each
kind of it once:

* names and arguments of JAX: each room of `jkv/`, each public verb, each file of the
  examples that users start, the libraries of models beside JAX;
* what the compiler makes of donation, aliasing, loops and collectives: tests that look
  at compiled modules, for elements as they are, as bits, and with scales;
* Pallas: a lowering for each kind of operands, an interpreted call, an export;
* meshes of either kind of axis, `shard_map`, several processes, kinds of memory;
* what tracing depends on: promotion, weak types, 64 bits, what is traced once, trees
  whose leaves are anything, gradients, callbacks, errors that JAX raises;
* what is written and read again by JAX: exported and kept programs, pickled values;
* one random game of each kind: it plays what verbs do together.

The oldest alone runs further values, options and dtypes of a program that the newest
has run once, single cases of a verb's bookkeeping, what the host computes, errors that
jkv raises itself, pages and docstrings. A test says so in one of three ways:

* `@pytest.mark.one_end` stands at a test, a class or a file for the oldest alone;
* `few(cases, *chosen)` are the cases of a test of which the newest plays the chosen;
* `dealt(cases)` is for many cases of one thing, such as the random games or the options
  of attention: each end plays those that the other does not.

`JKV_ALL_CASES=1` runs everything on the JAX at hand.
"""

import os

import jax

IS_NEWEST = jax.__version_info__ >= (0, 11)
ALL_CASES = bool(os.environ.get("JKV_ALL_CASES"))


def few(cases, *chosen):
    """The cases of this end: the newest plays the chosen ones, the oldest all."""
    cases = list(cases)
    assert all(case in cases for case in chosen)
    return [*chosen] if IS_NEWEST and not ALL_CASES else cases


def dealt(cases, turn=0, share=2):
    """The cases of this end: the newest plays one of `share`, the oldest the others."""
    places = range(len(cases := list(cases)))
    is_newest = [(place - turn) % share == 1 for place in places]
    return [cases[i] for i in places if ALL_CASES or is_newest[i] == IS_NEWEST]


def runs_here(is_marked):
    """Whether a test runs at this end, marked `one_end` or not."""
    return ALL_CASES or not (is_marked and IS_NEWEST)
