"""Speculative decoding: the text of plain decoding, whatever is guessed.

One program serves the tests of `PromptLookup`: three sequences run at a time, two of
each prompt, in pools in which others hold what is not free. The model recounts the
cache that each step gives it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_beam_search import checked_model, found_wrong
from test_generation import (
    assert_as_before,
    attention_model,
    attention_params,
    fresh_cache,
    padded,
    per_row,
    reasons,
    texts,
)

import jkv
from jkv.decoding import PromptLookup
from jkv.decoding.speculation.lookup import find_guesses
from jkv.decoding.speculation.pace import Pace

PROMPTS, SAMPLES, NEW_TOKENS = 4, 2, 20
STATIC = ("model", "max_new_tokens", "num_samples", "max_running")
LOOKUP = PromptLookup(num_tokens=3, min_ngram=1, cost=1.0)
generate = jax.jit(jkv.generate, static_argnames=STATIC)


def run(prompts, cache, speculate, limits=None, **options):
    """Generate in the shared shapes; the cache and the result."""
    found_wrong.clear()
    after, result = generate(
        checked_model,
        attention_params(),
        cache,
        padded(prompts, PROMPTS),
        max_new_tokens=NEW_TOKENS,
        limits=np.int32([NEW_TOKENS] * PROMPTS if limits is None else limits),
        stop_tokens=np.int32([2]),
        sampling=per_row(PROMPTS * SAMPLES, **options),
        num_samples=SAMPLES,
        max_running=3,
        speculate=speculate,
    )
    jax.effects_barrier()
    assert not found_wrong, found_wrong[0]
    assert_as_before(after, cache)
    return after, result


@pytest.mark.one_end
def test_texts_are_those_without_guesses_in_every_pool():
    """Refills, samples that fork, preemptions, prefix hits, limits, sampled texts."""
    rng = np.random.default_rng(1)
    accepted = preemptions = cached = drafted = 0
    for game in range(6):
        # Texts of few tokens, which recur.
        prompts = [rng.integers(3, 9, n).tolist() for n in rng.integers(1, 10, PROMPTS)]
        temperature = np.float32(rng.choice([0.0, 0.5, 1.0], PROMPTS * SAMPLES))
        penalty = np.float32(rng.choice([1.0, 1.2], PROMPTS * SAMPLES))
        limits = rng.integers(1, NEW_TOKENS + 1, PROMPTS)
        options = dict(temperature=temperature, repetition_penalty=penalty)
        blocks = [64, 9, 12, 8][game % 4]
        cache = fresh_cache(blocks, 8, prefix_caching=True)
        _, wide = run(prompts, fresh_cache(64, 8), None, limits, **options)
        for _ in range(2):  # the second finds what the first has left behind
            cache, result = run(prompts, cache, LOOKUP, limits, **options)
            assert (texts(result), reasons(result)) == (texts(wide), reasons(wide))
            np.testing.assert_allclose(result.logprobs, wide.logprobs, atol=2e-5)
            accepted += int(result.statistics.accepted_tokens)
            drafted += int(result.statistics.draft_tokens)
            preemptions += int(result.statistics.preemptions)
            cached += int(result.statistics.cached_tokens)
        if blocks == 64:
            assert result.statistics.num_steps < wide.statistics.num_steps
    assert drafted > accepted > 30 and preemptions > 3 and cached > 20


@pytest.mark.one_end
def test_the_longest_and_latest_run_is_looked_up():
    rows = [
        [7, 8, 9, 1, 8, 9, 2, 7, 8, 9],  # three tokens agree, then two
        [8, 9, 1, 5, 8, 9, 2, 5, 8, 9],  # of two that agree the later one
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 0],  # nothing recurs
        [4, 4, 4, -1, -1, -1, -1, -1, -1, -1],  # what repeats goes on repeating
        [6, -1, -1, -1, -1, -1, -1, -1, -1, -1],
    ]
    texts = np.array(rows, np.int32)
    lengths = (texts >= 0).sum(axis=1).astype(np.int32)
    look = jax.jit(find_guesses, static_argnums=2)
    guesses, counts = look(texts, lengths, PromptLookup(num_tokens=4, cost=1.0))
    found = [row[:n].tolist() for row, n in zip(guesses, counts, strict=True)]
    assert found == [[1, 8, 9, 2], [2, 5, 8, 9], [], [4, 4, 4, 4], []]


@pytest.mark.one_end
def test_guesses_that_fail_are_rarer_and_rarer():
    """Of 2,000 steps with seven wrong guesses each, some twenty are tried."""

    def step(pace, _):
        tries = (pace.wait == 0) & pace.pays(jnp.int32(56), jnp.int32(8), 1.5)
        none = jnp.int32(0)
        failed = pace.after_guesses(jnp.int32(56), none, jnp.int32(8), 1.5)
        pick = jax.tree.map(
            lambda a, b: jnp.where(tries, a, b), failed, pace.after_step()
        )
        return pick, tries

    _, tries = jax.jit(lambda: jax.lax.scan(step, Pace.begin(), length=2000))()
    assert 4 <= tries[:256].sum() <= 6 and tries.sum() <= 10
    # Where all are right, every step guesses.
    right = Pace.begin()
    for _ in range(3):
        right = right.after_guesses(jnp.int32(56), jnp.int32(56), jnp.int32(8), 1.5)
    assert right.pays(jnp.int32(8), jnp.int32(8), 1.5) and right.wait == 0
    assert not right.pays(jnp.int32(2), jnp.int32(8), 1.5)


@pytest.mark.one_end
@pytest.mark.parametrize(
    "options, text",
    [
        (dict(num_tokens=0), "num_tokens must be an int of at least 1"),
        (dict(max_ngram=1), "min_ngram <= max_ngram"),
        (dict(num_tokens=2, cost=3.0), "from 1 to below num_tokens"),
    ],
)
def test_wrong_options_of_a_look_up_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        PromptLookup(**options)


@pytest.mark.one_end
def test_a_model_without_logits_of_all_rows_is_refused():
    def model(params, tokens, cache, batch):
        return attention_model(params, tokens, cache, batch)

    with pytest.raises(ValueError, match="give the model an argument all_rows=False"):
        jax.eval_shape(
            lambda cache: jkv.generate(
                model,
                attention_params(),
                cache,
                [[1, 2]],
                max_new_tokens=2,
                speculate=LOOKUP,
            ),
            fresh_cache(),
        )
