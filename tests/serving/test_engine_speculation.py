"""Engines with speculative decoding: completions equal plain decoding.

Two sequences run at a time, in pools partly held by other sequences; one program per
kind of draft. `test_speculation.py` covers samples, prefixes and stops. The draft model
is the model, except for the successor at every third position.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.decoding.plain_queue import hash_model
from support.serving.small_engines import (
    BLOCK_SIZE,
    CONTEXT,
    NEW_TOKENS,
    WIDTH,
    assert_alone,
    come_and_go,
    draw_request,
)
from support.small_caches import copied, filled_cache, small_config

import jkv
from jkv.decoding import DraftModel, PromptLookup, Sampling
from jkv.serving import Engine, StopSizes
from jkv.serving.device import programs

pytestmark = pytest.mark.one_end

BLOCKS, RUNNING, OTHERS = 24, 2, 4
PLAIN = dict(n=1, stop_tokens=[], stop_sequences=[])
LOOKUP = PromptLookup(num_tokens=3, min_ngram=1, cost=1.0)


CONFIG = small_config(
    num_blocks=BLOCKS,
    block_size=BLOCK_SIZE,
    max_sequences=RUNNING + OTHERS,
    max_context_length=CONTEXT,
)


@functools.cache
def pool(free_blocks=BLOCKS, drafted=False):
    """Create a pool full of NaN, with a draft model's layers if `drafted`."""
    config = jkv.with_drafter(CONFIG, draft()) if drafted else CONFIG
    cache = filled_cache(config)
    taken = [min(5, max(0, BLOCKS - free_blocks - 5 * i)) for i in range(OTHERS)]
    cache, _ = jkv.allocate(cache, [BLOCK_SIZE * count for count in taken])
    assert int(jkv.num_free_blocks(cache)) == free_blocks
    return cache


def often_right(params, tokens, cache, batch):
    """The hash model, with a wrong token at every third position."""
    logits, cache = hash_model(params, tokens, cache, batch)
    is_wrong = batch.context_lengths % 3 == 0
    return jnp.where(is_wrong[:, None], jnp.roll(logits, 1, axis=1), logits), cache


def draft():
    params = np.uint32(0)
    return DraftModel(
        model=often_right, params=params, config=CONFIG, num_tokens=3, cost=1.0
    )


def make_engine(speculate, cache=None, nan_every=0):
    """Create an engine that checks the cache after each window."""
    if cache is None:
        cache = pool(drafted=speculate is not LOOKUP)
    return Engine(
        hash_model,
        np.uint32(nan_every),
        copied(cache),
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
    """Requests include sampling, NaN logits and cancellation."""
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


@pytest.mark.further
@pytest.mark.parametrize("free_blocks", [24, 6])
def test_draft_models_preserve_completions(free_blocks):
    """Greedy, in pools for both sequences or little more than one."""
    rng = np.random.default_rng(free_blocks)
    engine = make_engine(draft(), pool(free_blocks, drafted=True))
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


def test_a_reused_number_uses_no_older_drafts():
    """A number is reused after `num_prompts` requests, here at the same batch index."""
    engine = make_engine(draft())
    others, prompt = [[1], [2], [3]], [9] * 9

    def count():
        """Return the completion and its draft tokens; other requests draft none."""
        before = engine.stats()
        (found,) = engine.generate([prompt], max_new_tokens=8)
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


def test_drafts_are_reset_after_a_failed_step():
    fresh = filled_cache(jkv.with_drafter(CONFIG, draft()))
    engine = make_engine(draft(), fresh)
    prompts = [[1, 2], [3], [4, 5, 6]]
    before = [each.tokens for each in engine.generate(prompts)]
    guessed = engine.stats().draft_tokens
    engine._scheduler.loop.start_again()
    assert [each.tokens for each in engine.generate(prompts)] == before
    assert engine.stats().draft_tokens == 2 * guessed
    assert_released(engine, BLOCKS)


def count(params, tokens, cache, batch, *, all_rows=False):
    """Each token has one successor, in a table of logits."""
    logits = params[tokens]
    last = jnp.minimum(batch.last_rows, len(tokens) - 1)
    return (logits if all_rows else logits[last]), cache


@pytest.mark.further
def test_a_drafters_weights_are_updated_with_the_models():
    ahead = 9 * np.roll(np.eye(7, dtype=np.float32), 1, axis=1)
    behind = 9 * np.roll(np.eye(7, dtype=np.float32), -1, axis=1)
    drafter = DraftModel(
        model=count, params=ahead, config=CONFIG, num_tokens=3, cost=1.0
    )
    cache = copied(filled_cache(jkv.with_drafter(CONFIG, drafter)))
    sizes = dict(max_running=1, max_new_tokens=8, num_steps=3, row_counts=(4,))
    engine = Engine(count, ahead, cache, speculate=drafter, **sizes)

    def run():
        before = engine.stats().accepted_tokens
        (found,) = engine.generate([[0]])
        return found.tokens, engine.stats().accepted_tokens - before

    forwards, backwards = [1, 2, 3, 4, 5, 6, 0, 1], [6, 5, 4, 3, 2, 1, 0, 6]
    tokens, accepted = run()
    assert tokens == forwards and accepted > 3
    engine.update_params(behind)  # the drafter's weights are kept
    tokens, accepted = run()
    assert tokens == backwards and accepted == 0
    engine.update_params(ahead, draft_params=behind)
    assert run() == (forwards, 0)
    engine.update_params(behind, draft_params=behind)
    tokens, accepted = run()
    assert tokens == backwards
