"""Loops traced by a plain `jax.jit`, with lists or arrays as arguments.

Under `jax.jit` a list of numbers is a list of tracers. Nothing is compiled: arguments
are read during tracing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_caches import opened, small_cache, small_config

import jkv
from jkv import decoding

pytestmark = pytest.mark.one_end


def model(_params, tokens, cache, batch, *, all_rows=False):
    logits = jax.nn.one_hot(tokens + 1, 7)
    return (logits if all_rows else logits[batch.last_rows]), cache


def running():
    """Return a cache and the state of a queue before its first step."""
    cache = small_cache()
    state = decoding.begin(
        model, None, cache, np.full((4, 3), -1, np.int32), max_new_tokens=2
    )
    return cache, state


def add_prompts(*args, **options):
    return decoding.add_prompts(*running(), *args, **options)


def sample(temperature, seeds, counts):
    sampling = jkv.Sampling(temperature=temperature, seeds=seeds)
    return decoding.sample(jnp.ones((2, 7)), sampling, counts)


PROMPTS = [[1, 2, 3], [4, 5, 6]]
OF_PROMPTS = dict(salts=[3, 4], limits=[2, 1])
STOPS = dict(stop_tokens=[5, 2], stop_sequences=[[6, 1], [3, 2]])
STOPS_OF_EACH = dict(stop_tokens=[[5], [2]], stop_sequences=[[[6, 1]], [[3, 2]]])
STEPS = dict(max_new_tokens=2, chunk_size=4)
# Each loop with its static and its traced arguments.
LOOPS = {
    "generate": (jkv.generate, dict(max_running=2, **STEPS), OF_PROMPTS | STOPS),
    "generate, stops of each": (jkv.generate, STEPS, OF_PROMPTS | STOPS_OF_EACH),
    "begin": (decoding.begin, dict(max_running=2, **STEPS), OF_PROMPTS | STOPS),
    "beam_search": (
        jkv.beam_search,
        dict(num_beams=2, num_return=2, **STEPS),
        dict(salts=[3, 4], stop_tokens=[5, 2], length_penalty=0.5),
    ),
}


def kinds(value):
    """Return an argument in all forms that callers write."""
    if not isinstance(value, list):
        return [value, np.asarray(value), jnp.asarray(value)]
    rows = [np.asarray(row, np.int32) for row in value]
    nested = [] if rows[0].ndim == 0 else [rows, [jnp.asarray(row) for row in rows]]
    tuples = tuple(tuple(row) if isinstance(row, list) else row for row in value)
    return [value, tuples, np.asarray(value), jnp.asarray(value), *nested]


@pytest.mark.parametrize("name", LOOPS)
def test_arguments_of_loops(name):
    loop, static, arrays = LOOPS[name]
    good = dict(prompts=PROMPTS, **arrays)

    def run(arguments):
        prompts = arguments.pop("prompts")
        found = loop(model, None, small_cache(), prompts, **static, **arguments)
        return found[1] if isinstance(found, tuple) else found

    shapes = jax.eval_shape(
        run, {name: np.asarray(each) for name, each in good.items()}
    )
    for argument, value in good.items():
        for given in kinds(value):
            found = jax.eval_shape(run, good | {argument: given})
            assert jax.tree.leaves(found) == jax.tree.leaves(shapes), argument


CALLS = {
    "extend": (
        functools.partial(jkv.extend, model, None),
        dict(seq_ids=[0, 1], tokens=PROMPTS, stop_tokens=[5, 2]),
        dict(cache=opened(0, 0), max_new_tokens=2),
    ),
    "score": (
        functools.partial(jkv.score, model, None),
        dict(prompts=PROMPTS, continuations=PROMPTS),
        dict(config=small_config()),
    ),
    "add_prompts": (
        add_prompts,
        dict(indices=[1, 2], prompts=PROMPTS, limits=[1, 2], priorities=[1, 0]),
        {},
    ),
    "sample": (sample, dict(temperature=[0.5, 1.0], seeds=[3, 4], counts=[1, 2]), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_other_functions(name):
    function, arrays, others = CALLS[name]
    for argument, value in arrays.items():
        for given in kinds(value):
            jax.eval_shape(
                lambda arguments: function(**arguments, **others),
                arrays | {argument: given},
            )
