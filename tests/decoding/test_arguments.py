"""Tests of loop arguments as values or as fields, and of their errors."""

import functools

import jax
import numpy as np
import pytest
from support.small_caches import opened, small_cache

import jkv
from jkv import decoding
from jkv.decoding import DecodingOptions, GenerationConfig, Prompts
from jkv.logits_processors import TokenBias

pytestmark = pytest.mark.one_end
ROWS = [[1, 2, 3], [4]]
OF_PROMPTS = dict(limits=[2, 1], salts=[3, 4], stop_tokens=[5], stop_sequences=[[6, 1]])
CONFIG = dict(max_new_tokens=2, num_samples=2, max_running=3, row_counts=(4,))
OPTIONS = dict(
    logits_processor=TokenBias(np.array([1]), np.array([1.0], np.float32)),
    speculate=jkv.PromptLookup(num_tokens=3),
)
VALUES = dict(
    generation_config=GenerationConfig(**CONFIG), options=DecodingOptions(**OPTIONS)
)


def model(_params, tokens, cache, batch, *, all_rows=False):
    logits = jax.nn.one_hot(tokens + 1, 7)
    return (logits if all_rows else logits[batch.last_rows]), cache


def begin(prompts, **options):
    return decoding.begin(model, None, small_cache(), prompts, **options)


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert jax.tree.all(jax.tree.map(np.array_equal, one, other))


def test_values_equal_their_fields():
    """`begin` returns the same state for both, also if they are traced."""
    named = begin(ROWS, **OF_PROMPTS, **CONFIG, **OPTIONS)
    prompts = Prompts.of(ROWS, **OF_PROMPTS)
    same(begin(prompts, **VALUES), named)
    same(begin(prompts, **CONFIG, options=VALUES["options"]), named)
    same(begin(ROWS, **OF_PROMPTS, **VALUES), named)
    jitted = jax.jit(begin, static_argnames="generation_config")
    same(jitted(prompts, **VALUES), named)
    same(jkv.jitted.begin(model, None, small_cache(), prompts, **VALUES), named)
    assert not jax.tree.all(
        jax.tree.map(np.array_equal, named, begin(ROWS, **CONFIG, **OPTIONS))
    )


def test_added_prompts_have_their_own_stop_conditions():
    cache, empty = small_cache(), np.full((2, 3), -1, np.int32)
    stops = dict(stop_tokens=np.full((2, 1), -1), stop_sequences=np.full((2, 1, 2), -1))
    state = begin(empty, max_new_tokens=2, **stops)
    add = functools.partial(decoding.add_prompts, cache, state, [1])
    own = dict(stop_tokens=[[5]], stop_sequences=[[[6, 1]]], limits=[1])
    value = Prompts.of(np.array([[1, 2, 3]]), **own)
    same(add(value, priorities=3), add(np.array([[1, 2, 3]]), **own, priorities=3))
    assert add(value).prompts.limits.tolist() == [2, 1]
    with pytest.raises(jkv.UsageError, match="a Prompts and the keywords limits"):
        add(value, limits=[1])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(), "begin.* needs max_new_tokens or generation_config"),
        (dict(max_new_tokens=2, tokens=3), "begin.* unexpected .*'tokens'"),
        (
            dict(generation_config=VALUES["generation_config"], max_new_tokens=2),
            "a GenerationConfig and the keywords max_new_tokens",
        ),
        (dict(max_new_tokens=2, options=3), "expected a DecodingOptions, got 3"),
        (
            dict(max_new_tokens=2, options=DecodingOptions(), speculate=None),
            "a DecodingOptions and the keywords speculate",
        ),
        (dict(generation_config=4), "expected a GenerationConfig, got 4"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_duplicate_or_unknown_arguments_are_refused(options, message):
    with pytest.raises(jkv.UsageError, match=message):
        begin(ROWS, **options)
    if "max_new_tokens" in options and "generation_config" not in options:
        with pytest.raises(jkv.UsageError, match="a Prompts and the keywords salts"):
            begin(Prompts.of(ROWS), max_new_tokens=2, salts=1)


def test_loops_refuse_unsupported_arguments():
    extend = functools.partial(jkv.extend, model, None, opened(0, 0), [0, 1], ROWS)
    with pytest.raises(jkv.UsageError, match="extend does not support max_running"):
        extend(generation_config=GenerationConfig(2, max_running=1))
    with pytest.raises(jkv.UsageError, match="num_samples is not supported by extend"):
        extend(max_new_tokens=2, num_samples=2)
    with pytest.raises(jkv.UsageError, match="salts is not supported by extend"):
        extend(max_new_tokens=2, salts=1)
    with pytest.raises(jkv.UsageError, match="beam_search does not support exact"):
        jkv.beam_search(
            model,
            None,
            small_cache(),
            ROWS,
            num_beams=2,
            generation_config=GenerationConfig(2, exact=True),
        )
    with pytest.raises(
        jkv.UsageError, match="max_new_tokens is not supported by decode"
    ):
        decoding.decode(
            model, None, small_cache(), begin(ROWS, max_new_tokens=2), max_new_tokens=3
        )
