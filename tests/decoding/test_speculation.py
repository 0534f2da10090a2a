"""Speculative decoding: completions equal plain decoding, whatever the draft tokens.

One program runs the tests of `PromptLookup`: three sequences at a time, two per prompt,
in pools partly held by other sequences. The model checks the cache of each step.
Completions and the number of steps without draft tokens are computed in plain Python.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoding.plain_queue import Call, PlainCompletions, PlainQueue
from test_beam_search import checked_model, found_wrong
from test_generation import (
    CONTEXT,
    assert_as_before,
    attention_model,
    attention_params,
    completions,
    dense_logits,
    fresh_cache,
    padded,
    per_row,
    reasons,
)

import jkv
from jkv.decoding import PromptLookup
from jkv.decoding.speculation.draft_tokens import DraftTokens, row_sizes
from jkv.decoding.speculation.pace import Pace
from jkv.decoding.speculation.prompt_lookup import find_draft_tokens

PROMPTS, SAMPLES, NEW_TOKENS, RUNNING, ROW_COUNTS = 4, 2, 20, 3, (32,)
STATIC = ("model", "max_new_tokens", "num_samples", "max_running", "row_counts")
LOOKUP = PromptLookup(num_tokens=3, min_ngram=1, cost=1.0)
generate = jax.jit(jkv.generate, static_argnames=STATIC)


def run(prompts, cache, limits, sampling):
    """Generate with speculation; return the cache and the result."""
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
    )
    jax.effects_barrier()
    assert not found_wrong, found_wrong[0]
    assert_as_before(after, cache)
    return after, result


def run_alone(prompts, limits, sampling):
    """Complete each prompt alone with a dense model; return also the queue's steps."""
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
    alone = PlainCompletions(
        call, lambda sequences: np.stack([*map(dense_logits, sequences)])
    )
    return alone, PlainQueue(call, alone, RUNNING, ROW_COUNTS).statistics["num_steps"]


@pytest.mark.further
@pytest.mark.one_end
def test_speculation_preserves_sequences_in_every_pool():
    """Refills, forked samples, preemptions, prefix hits, limits, and sampling."""
    rng = np.random.default_rng(1)
    accepted = preemptions = cached = drafted = 0
    for game in range(6):
        # A small vocabulary, so that tokens recur.
        prompts = [rng.integers(3, 9, n).tolist() for n in rng.integers(1, 10, PROMPTS)]
        temperature = np.float32(rng.choice([0.0, 0.5, 1.0], PROMPTS * SAMPLES))
        penalty = np.float32(rng.choice([1.0, 1.2], PROMPTS * SAMPLES))
        limits = rng.integers(1, NEW_TOKENS + 1, PROMPTS)
        options = dict(temperature=temperature, repetition_penalty=penalty)
        blocks = [64, 9, 12, 8][game % 4]
        cache = fresh_cache(blocks, 8, prefix_caching=True)
        sampling = per_row(PROMPTS * SAMPLES, **options)
        alone, num_steps = run_alone(prompts, limits, sampling)
        for turn in range(2):  # the second call hits the cached blocks of the first
            cache, result = run(prompts, cache, limits, sampling)
            assert completions(result) == alone.new
            assert reasons(result) == [reason.name for reason in alone.reasons]
            for found, new in zip(result.logprobs, alone.logprobs, strict=True):
                np.testing.assert_allclose(found[: len(new)], new, atol=2e-5)
            accepted += int(result.statistics.accepted_tokens)
            drafted += int(result.statistics.draft_tokens)
            preemptions += int(result.statistics.preemptions)
            cached += int(result.statistics.cached_tokens)
            if blocks == 64 and turn == 0:
                assert result.statistics.num_steps < num_steps
    assert drafted > accepted > 30 and preemptions > 3 and cached > 20


@pytest.mark.one_end
def test_lookup_uses_the_longest_and_latest_match():
    rows = [
        [7, 8, 9, 1, 8, 9, 2, 7, 8, 9],  # matches of three tokens, then of two
        [8, 9, 1, 5, 8, 9, 2, 5, 8, 9],  # of two equal matches, the later one
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 0],  # nothing recurs
        [4, 4, 4, -1, -1, -1, -1, -1, -1, -1],  # repetition continues
        [6, -1, -1, -1, -1, -1, -1, -1, -1, -1],
    ]
    sequences = np.array(rows, np.int32)
    lengths = (sequences >= 0).sum(axis=1).astype(np.int32)
    look = jax.jit(find_draft_tokens, static_argnums=2)
    draft_tokens, counts = look(
        sequences, lengths, PromptLookup(num_tokens=4, cost=1.0)
    )
    found = [row[:n].tolist() for row, n in zip(draft_tokens, counts, strict=True)]
    assert found == [[1, 8, 9, 2], [2, 5, 8, 9], [], [4, 4, 4, 4], []]


EIGHT, COST = np.int32(8), 1.5


def draft_token(counts, certain=0):
    """Return draft tokens with these counts; the token ids do not matter."""
    counts = jnp.asarray(counts, jnp.int32)
    certain = jnp.broadcast_to(certain, counts.shape)
    return DraftTokens(jnp.zeros((len(counts), 7), jnp.int32), counts, certain)


def play(right, num_steps, present=8):
    """Draft seven tokens for eight sequences; return the drafting ones, bool[steps, 8].

    Args:
        right: accepted tokens of each sequence, i32[8].
        num_steps: the number of steps.
        present: the number of sequences with draft tokens.
    """
    return np.asarray(play_long(np.int32(right), np.int32(present)))[:num_steps]


@jax.jit
def play_long(right, present):
    """Run 2,000 such steps."""
    found = jnp.where(jnp.arange(8) < present, 7, 0).astype(jnp.int32)

    def step(pace, _):
        pace = pace.follow(jnp.arange(8, dtype=jnp.int32))
        draft_tokens = jnp.where(pace.choose(draft_token(found), EIGHT, COST), found, 0)
        accepted = jnp.minimum(right, draft_tokens)
        after = pace.after_verification(
            draft_token(draft_tokens), accepted, EIGHT, COST
        )
        guessed = jnp.any(draft_tokens > 0)
        pick = jax.tree.map(
            lambda a, b: jnp.where(guessed, a, b), after, pace.after_step()
        )
        return pick, draft_tokens > 0

    return jax.lax.scan(step, Pace.begin(8, 7, COST), length=2000)[1]


@pytest.mark.one_end
def test_rejected_drafts_back_off_exponentially():
    """Seven of 2,000 steps verify, if all seven draft tokens are always wrong."""
    tries = play([0] * 8, 2000).any(axis=1)
    assert tries.nonzero()[0].tolist() == [0, 17, 82, 339, 852, 1365, 1878]
    # If all are right, every step drafts.
    assert play([7] * 8, 50).all()
    # Draft tokens for two of eight sequences do not pay off.
    assert not play([7] * 8, 50, present=2).any()


@pytest.mark.one_end
def test_repetitive_sequences_are_drafted_and_others_rarely():
    guessed = play([7, 7, 7, 0, 0, 0, 0, 0], 200)
    assert guessed[:, :3].all()
    assert 0.01 < guessed[:, 3:].mean() < 0.1
    # One such sequence is worth a step of eight rows; one with fewer hits is not.
    assert play([7, 0, 0, 0, 0, 0, 0, 0], 200)[:, 0].mean() > 0.9
    assert play([2, 0, 0, 0, 0, 0, 0, 0], 200).any(axis=1).sum() == 3


@pytest.mark.one_end
def test_a_new_sequence_starts_at_the_typical_rate():
    good = Pace.begin(2, 7, COST).follow(jnp.int32([0, 1]))
    for accepted in ([7, 7], [7, 7]):
        good = good.after_verification(
            draft_token([7, 7]), jnp.int32(accepted), jnp.int32(2), COST
        )
    assert good.follow(jnp.int32([0, 5])).rates.tolist() == good.rates.tolist()
    mixed = good.after_verification(
        draft_token([7, 7]), jnp.int32([7, 0]), jnp.int32(2), COST
    )
    rates = mixed.follow(jnp.int32([0, 6])).rates.tolist()
    assert mixed.rates[1] < rates[1] == mixed.typical < rates[0] == mixed.rates[0]


@pytest.mark.one_end
def test_steps_with_few_draft_tokens_have_few_rows():
    assert row_sizes(8, 7) == (22, 64)
    assert row_sizes(1, 7) == (8,) and row_sizes(2, 7) == (16,)
    assert row_sizes(3, 3) == (6, 12)  # of the program above


@pytest.mark.one_end
@pytest.mark.parametrize(
    "options, text",
    [
        (dict(num_tokens=0), "num_tokens must be an int of at least 1"),
        (dict(max_ngram=1), "min_ngram <= max_ngram"),
        (dict(max_ngram=2.5), "max_ngram must be a static int"),
        (dict(num_tokens=2, cost=3.0), "from 1 to below num_tokens"),
        (dict(cost=jnp.float32(2)), "cost must be a static number"),
    ],
)
def test_invalid_lookup_options_are_refused(options, text):
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


@pytest.mark.one_end
def test_forced_tokens_are_always_drafted_and_not_counted():
    """Three tokens are forced; four are looked up and rejected."""
    pace, forced = Pace.begin(8, 7, COST), jnp.full((8,), 3, jnp.int32)
    for _ in range(20):
        draft_tokens = draft_token([7] * 8, forced)
        assert pace.choose(draft_tokens, EIGHT, COST).all()
        pace = pace.after_verification(draft_tokens, forced, EIGHT, COST)
    assert pace.typical < 0.01 and pace.rates.max() < 0.01
    # Without looked-up tokens the statistics do not change.
    same = pace.after_verification(draft_token([3] * 8, forced), forced, EIGHT, COST)
    np.testing.assert_array_equal(same.typical, pace.typical)
    # Lookup alone is no longer tried.
    assert not pace.choose(draft_token([7] * 8), EIGHT, COST).any()
