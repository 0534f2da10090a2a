"""Steered texts: each is the one that plain Python makes of it alone.

Random automata allow tokens, force them and end texts. What is steered is the model of
`test_generation`, in its shapes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.automata import PlainAutomaton, make_automata
from support.plain_queue import Call, PlainTexts
from test_beam_search import checked_model, found_wrong
from test_draft_model import similar_params
from test_generation import (
    CONTEXT,
    VOCABULARY,
    assert_as_before,
    attention_params,
    dense_logits,
    fresh_cache,
    padded,
    per_row,
    reasons,
    texts,
)

import jkv
from jkv import decoding
from jkv.decoding import DraftModel, PromptLookup

pytestmark = pytest.mark.one_end

PROMPTS, SAMPLES, NEW_TOKENS, RUNNING, ROW_COUNTS = 4, 2, 20, 3, (32,)
STATIC = ("model", "max_new_tokens", "num_samples", "max_running", "row_counts")
LOOKUP = PromptLookup(num_tokens=3, min_ngram=1, cost=1.0)
generate = jax.jit(jkv.generate, static_argnames=STATIC)


def random_prompts(rng):
    """Of few tokens, which recur."""
    return [rng.integers(3, 9, n).tolist() for n in rng.integers(1, 10, PROMPTS)]


def run_alone(prompts, limits, sampling, automata, variants):
    """Each text by itself, of a model without a cache."""
    call = Call(
        prompts=prompts,
        limits=limits.tolist(),
        num_samples=SAMPLES,
        max_new_tokens=NEW_TOKENS,
        stop_tokens=[2],
        stop_sequences=[],
        sampling=sampling,
        nan_every=0,
        block_size=4,
        max_context_length=CONTEXT,
        num_blocks=64,
    )
    plain = [
        PlainAutomaton(automata, variants[i // SAMPLES], prompts[i // SAMPLES])
        for i in range(PROMPTS * SAMPLES)
    ]
    return PlainTexts(
        call, lambda texts: np.stack([*map(dense_logits, texts)]), plain
    )


def test_steered_texts_are_those_of_each_alone():
    """Queue, samples, preemptions, prefix hits, look-up, forced tokens, both ends."""
    rng = np.random.default_rng(3)
    seen, preemptions, accepted = set(), 0, 0
    for game in range(8):
        automata = make_automata(game, 3, VOCABULARY)
        prompts, variants = random_prompts(rng), rng.integers(-1, 3, PROMPTS)
        temperature = np.float32(rng.choice([0.0, 1.0], PROMPTS * SAMPLES))
        sampling = per_row(PROMPTS * SAMPLES, temperature=temperature)
        limits = rng.integers(1, NEW_TOKENS + 1, PROMPTS)
        alone = run_alone(prompts, limits, sampling, automata, variants)
        cache = fresh_cache([64, 9, 12, 8][game % 4], 8, prefix_caching=True)
        for _ in range(2):  # the second finds what the first has left behind
            found_wrong.clear()
            after, result = generate(
                checked_model,
                attention_params(),
                cache,
                padded(prompts, PROMPTS),
                max_new_tokens=NEW_TOKENS,
                limits=np.int32(limits),
                stop_tokens=np.int32([2]),
                sampling=sampling,
                num_samples=SAMPLES,
                max_running=RUNNING,
                row_counts=ROW_COUNTS,
                speculate=LOOKUP,
                steering=automata,
                variants=np.int32(variants),
            )
            jax.effects_barrier()
            assert not found_wrong, found_wrong[0]
            assert_as_before(after, cache)
            assert texts(result) == alone.new
            assert reasons(result) == [reason.name for reason in alone.reasons]
            for found, new in zip(result.logprobs, alone.logprobs, strict=True):
                np.testing.assert_allclose(found[: len(new)], new, atol=2e-5)
            seen |= {*reasons(result)}
            preemptions += int(result.statistics.preemptions)
            accepted += int(result.statistics.accepted_tokens)
            cache = after
    assert {"STOP", "LENGTH", "NOTHING_ALLOWED"} <= seen
    assert preemptions > 3 and accepted > 20
