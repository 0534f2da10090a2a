"""`jkv.jitted`: the loops as they are, traced once, the cache donated."""

import inspect

import numpy as np
import pytest
from support.small_attention_model import attention_model, attention_params
from support.small_caches import copied
from test_generation import fresh_cache

import jkv
from jkv import decoding, jitted

pytestmark = pytest.mark.one_end
PROMPTS = [[3, 4, 5], [6]]
ROWS = (8,)

# What a loop has beside static arguments: arrays, or trees of them.
TRACED = {
    *("params", "cache", "state", "prompts", "tokens", "continuations", "seq_ids"),
    *("limits", "stop_tokens", "stop_sequences", "salts", "variants", "num_steps"),
    *("sampling", "speculate", "steering", "steering_state", "length_penalty"),
}


@pytest.mark.parametrize("name", jitted.__all__)
def test_every_argument_is_either_static_or_traced(name: str) -> None:
    parameters = {*inspect.signature(getattr(decoding, name)).parameters}
    assert parameters <= jitted.STATIC | TRACED and not jitted.STATIC & TRACED
    assert inspect.signature(getattr(jitted, name)).parameters.keys() == parameters
    assert (jitted.TEXTS | jitted.NUMBERS) <= TRACED


def test_lists_and_arrays_are_one_program_and_the_cache_is_donated() -> None:
    traced = []

    def model(*args, **options):
        traced.append(1)
        return attention_model(*args, **options)

    def generate(cache, prompts, **options):
        return jitted.generate(
            model,
            attention_params(),
            cache,
            prompts,
            max_new_tokens=4,
            row_counts=[*ROWS],  # a list, which no static argument may be
            **options,
        )

    given = copied(fresh_cache())
    cache, found = generate(given, PROMPTS, stop_tokens=[2], limits=(4, 3))
    assert given.storage[0].key_pool.is_deleted()
    first = len(traced)
    assert first
    padded = np.array([[7, 8, 9], [6, -1, -1]], np.int32)
    cache, again = generate(cache, padded, stop_tokens=[1], limits=[2, 2**40])
    assert len(traced) == first
    assert not np.array_equal(found.tokens, again.tokens)
    expected = jkv.generate(
        attention_model,
        attention_params(),
        fresh_cache(),
        PROMPTS,
        max_new_tokens=4,
        row_counts=ROWS,
        stop_tokens=[2],
        limits=[4, 3],
    )[1]
    np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_decode_takes_over_cache_and_state() -> None:
    options = dict(max_new_tokens=4, row_counts=ROWS)
    params, cache = attention_params(), copied(fresh_cache())
    state = jitted.begin(attention_model, params, cache, PROMPTS, **options)
    assert not cache.storage[0].key_pool.is_deleted()
    lengths = state.result.lengths
    _, state = jitted.decode(attention_model, params, cache, state)
    assert cache.storage[0].key_pool.is_deleted() and lengths.is_deleted()
    assert state.result.lengths.tolist() == [4, 4]


def test_what_is_wrong_is_refused_as_by_the_loop() -> None:
    def generate(**options):
        return jitted.generate(
            attention_model,
            attention_params(),
            fresh_cache(),
            **{"prompts": PROMPTS, "max_new_tokens": 4} | options,
        )

    with pytest.raises(jkv.UsageError, match="prompts must be"):
        generate(prompts=[[1.5]])
    with pytest.raises(ValueError, match="stop_sequences must be"):
        generate(stop_sequences=[[1.5]])
    with pytest.raises(TypeError, match="max_tokens"):
        generate(max_tokens=3)
