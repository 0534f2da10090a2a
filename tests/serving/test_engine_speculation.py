"""Engines with speculative decoding: the texts equal plain decoding's.

Two texts run at a time, in pools where others hold the remaining blocks; one program
for each kind of draft. Samples, prefixes and stops meet them in `test_speculation.py`.
The draft model is the model, but for the successor of every third position.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.plain_queue import hash_model
from support.small_caches import copied, small_cache
from support.small_engines import (
    BLOCK_SIZE,
    CONTEXT,
    NEW_TOKENS,
    WIDTH,
    assert_alone,
    come_and_go,
    draw_request,
)

import jkv
from jkv.decoding import DraftModel, PromptLookup, Sampling
from jkv.serving import Engine, StopSizes
from jkv.serving.device import programs

pytestmark = pytest.mark.one_end

BLOCKS, RUNNING, OTHERS = 24, 2, 4
PLAIN = dict(n=1, stop_tokens=[], stop_sequences=[])
LOOKUP = PromptLookup(num_tokens=3, min_ngram=1, cost=1.0)


@functools.cache
def pool(free_blocks=BLOCKS):
    """A pool full of NaN."""
    cache = small_cache(
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        max_sequences=RUNNING + OTHERS,
        max_context_length=CONTEXT,
    )
    taken = [min(5, max(0, BLOCKS - free_blocks - 5 * i)) for i in range(OTHERS)]
    cache, _ = jkv.allocate(cache, [BLOCK_SIZE * count for count in taken])
    assert int(jkv.num_free_blocks(cache)) == free_blocks
    return cache


def often_right(params, tokens, cache, batch):
    """Wrong about every third position."""
    logits, cache = hash_model(params, tokens, cache, batch)
    is_wrong = batch.context_lengths % 3 == 0
    return jnp.where(is_wrong[:, None], jnp.roll(logits, 1, axis=1), logits), cache


def draft(cache=None):
    cache = copied(pool() if cache is None else cache)
    params = np.uint32(0)
    return DraftModel(
        model=often_right, params=params, cache=cache, num_tokens=3, cost=1.0
    )


def make_engine(speculate, cache=None, nan_every=0):
    """An engine that looks at the invariants of all caches after each window."""
    return Engine(
        hash_model,
        np.uint32(nan_every),
        copied(pool() if cache is None else cache),
        max_running=RUNNING,
        max_new_tokens=NEW_TOKENS,
        max_prompt_tokens=WIDTH,
        num_steps=3,
        row_counts=(10,),
        stop_sizes=StopSizes(0, 0, 0),
        speculate=speculate,
        checks=True,
    )


def assert_released(engine, free_blocks):
    assert int(jkv.num_free_blocks(engine.cache)) == free_blocks
    stats = engine.stats()
    assert stats.waiting == stats.running == stats.preempted == 0


def test_prompt_lookup_preserves_completions():
    """Sampled ones too, NaN, and cancelled ones."""
    totals = np.zeros(3, int)
    for seed, free_blocks in enumerate([5, 24, 6, 24]):
        rng, nan_every = np.random.default_rng(seed), 17 * (seed // 2)
        engine = make_engine(LOOKUP, pool(free_blocks), nan_every)
        left = [draw_request(rng, **PLAIN) for _ in range(20)]
        requests, _, cancelled = come_and_go(engine, rng, left)
        for number, request in requests.items():
            found = engine.results(number)
            assert_alone(found, request, free_blocks=free_blocks, nan_every=nan_every)
        stats = engine.stats()
        assert stats.cancelled == len(cancelled)
        totals += [stats.draft_tokens, stats.accepted_tokens, stats.preemptions]
        assert_released(engine, free_blocks)
    drafted, accepted, preemptions = totals
    assert drafted > 5 * accepted > 0 and preemptions > 0


@pytest.mark.parametrize("free_blocks, of_draft", [(24, 24), (6, 7)])
def test_draft_models_preserve_completions(free_blocks, of_draft):
    """Greedy ones. The draft has room for both texts, or for some more than one."""
    rng = np.random.default_rng(free_blocks)
    engine = make_engine(draft(pool(of_draft)), pool(free_blocks))
    assert engine.warm_up() == 3
    compiled = [programs.begin_empty, programs.exchange, programs.run_window]
    before = [program._cache_size() for program in compiled]
    ways = [Sampling(repetition_penalty=1.3), *3 * [Sampling()]]
    left = [draw_request(rng, sampling=ways[i % 4], **PLAIN) for i in range(20)]
    requests, _, cancelled = come_and_go(engine, rng, left)
    for number, request in requests.items():
        assert_alone(engine.results(number), request, free_blocks=free_blocks)
    stats = engine.stats()
    assert stats.cancelled == len(cancelled) > 0
    assert stats.preemptions > 0 or free_blocks > 6
    assert 0.3 < stats.acceptance_rate < 0.9 and stats.draft_tokens > 50
    assert [program._cache_size() for program in compiled] == before
    assert_released(engine, free_blocks)


def test_a_reused_number_drafts_nothing_older():
    """A number comes again after `num_prompts` requests, here in the same place."""
    engine = make_engine(draft())
    others, text = [[1], [2], [3]], [9] * 9

    def count():
        """Return the text and its draft tokens; nothing is drafted for others."""
        before = engine.stats()
        (found,) = engine.generate([text], max_new_tokens=8)
        after = engine.stats()
        engine.generate(others, max_new_tokens=1)
        return (
            found.tokens,
            after.draft_tokens - before.draft_tokens,
            after.accepted_tokens - before.accepted_tokens,
        )

    first = count()
    assert first[2] > 2
    (found,) = engine.generate([[5, 6, 7]])
    assert len(found.tokens) == NEW_TOKENS
    engine.generate(others, max_new_tokens=1)
    assert count() == first
    number = engine.submit([7, 6, 5, 4])
    for _ in range(2):
        engine.step()
    assert engine.cancel(number)
    engine.generate(others, max_new_tokens=1)
    assert count() == first


def test_drafts_begin_anew_when_a_step_failed():
    fresh = small_cache(
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        max_sequences=RUNNING + OTHERS,
        max_context_length=CONTEXT,
    )
    engine = make_engine(draft(fresh), fresh)
    prompts = [[1, 2], [3], [4, 5, 6]]
    before = [each.tokens for each in engine.generate(prompts)]
    guessed = engine.stats().draft_tokens
    engine._scheduler.loop.start_again()
    assert [each.tokens for each in engine.generate(prompts)] == before
    assert engine.stats().draft_tokens == 2 * guessed
    assert_released(engine, BLOCKS)
