"""The queue of `generate`, against a plain-Python generator and scheduler.

One compiled loop serves nearly all tests: 1,008 sequences of three samples each, five
of which run at one time. What varies is values: prompts, limits, blocks that others
hold, what stops, how often logits are NaN.
"""

import functools

import jax
import numpy as np
import pytest
from caches import small_cache
from plain_queue import VOCABULARY, Call, PlainQueue, PlainTexts, hash_model

import jkv
from jkv import decoding
from jkv.decoding import FinishReason, Sampling

PROMPTS, SAMPLES, WIDTH, NEW_TOKENS = 336, 3, 10, 12
CONTEXT, BLOCK_SIZE, BLOCKS, ROWS = 20, 4, 64, 24
RUNNING, ROW_COUNTS = 5, (5, 12)
STATIC = (
    "model",
    "max_new_tokens",
    "num_samples",
    "max_running",
    "chunk_size",
    "row_counts",
)
# What a step says of the pool, and what the plain queue tells of it.
COUNTED = (
    "num_steps sequence_steps prompt_tokens recomputed_tokens preemptions "
    "peak_blocks queue_steps idle_places"
).split()

generate = jax.jit(decoding.generate, static_argnames=STATIC)


@functools.cache
def pool(free_blocks=BLOCKS, free_rows=ROWS, **changes):
    """A pool full of NaN; others hold the blocks and rows that are not free."""
    fields = dict(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        max_sequences=ROWS + 16,
        max_context_length=CONTEXT,
    )
    cache = small_cache(**(fields | changes))
    taken = [
        min(5, max(0, BLOCKS - free_blocks - 5 * i))
        for i in range(ROWS + 16 - free_rows)
    ]
    cache, others = jkv.allocate(cache, [BLOCK_SIZE * count for count in taken])
    jkv.raise_for_status(others, cache)
    assert int(jkv.num_free_blocks(cache)) == free_blocks
    return cache


def draw_call(rng, num_prompts, free_blocks=BLOCKS, **changes):
    """A call at random; the prompts past `num_prompts` are empty."""
    length = rng.integers(1, WIDTH + 1, num_prompts)
    prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in length]
    prompts += [[]] * (PROMPTS - num_prompts)
    count = PROMPTS * SAMPLES
    options = dict(
        temperature=rng.choice([0.0, 0.7, 1.5], count),
        top_k=rng.choice([0, 3], count),
        top_p=rng.choice([1.0, 0.9], count),
        min_p=np.zeros(count),
        repetition_penalty=rng.choice([1.0, 1.3], count),
        seeds=rng.integers(0, 1000, count),
    )
    arrays = {
        name: np.asarray(values, np.int32 if name in ("top_k", "seeds") else np.float32)
        for name, values in options.items()
    }
    fields = dict(
        prompts=prompts,
        limits=rng.integers(0, NEW_TOKENS + 3, PROMPTS).tolist(),
        num_samples=SAMPLES,
        max_new_tokens=NEW_TOKENS,
        stop_tokens=[7, 11],
        stop_sequences=[[3, 4, 5], [9, 2], [], [1]],
        sampling=Sampling(**arrays),
        nan_every=0,
        block_size=BLOCK_SIZE,
        max_context_length=CONTEXT,
        num_blocks=free_blocks,
    )
    return Call(**(fields | changes))


def padded(rows, width):
    return np.array([[*row, *[-1] * (width - len(row))] for row in rows], np.int32)


def run(call, cache, max_running=RUNNING, row_counts=ROW_COUNTS, **options):
    """Generate with the model of hashes; everything is given back."""
    after, result = generate(
        hash_model,
        np.uint32(call.nan_every),
        cache,
        padded(call.prompts, WIDTH),
        max_new_tokens=call.max_new_tokens,
        limits=np.array(call.limits, np.int32),
        stop_tokens=np.array(call.stop_tokens, np.int32),
        stop_sequences=padded(call.stop_sequences, 3),
        sampling=call.sampling,
        num_samples=call.num_samples,
        max_running=max_running,
        row_counts=row_counts,
        **options,
    )
    jkv.check(after)
    assert int(jkv.num_free_blocks(after)) == int(jkv.num_free_blocks(cache))
    np.testing.assert_array_equal(after.metadata.is_open, cache.metadata.is_open)
    return jax.device_get(result)


def assert_texts(result, texts):
    """Tokens and reasons are those of each sequence alone, logprobs nearly."""
    count = len(texts.new)
    assert [FinishReason(r).name for r in result.reasons] == [
        r.name for r in texts.reasons
    ]
    np.testing.assert_array_equal(result.lengths, [len(new) for new in texts.new])
    np.testing.assert_array_equal(result.tokens, padded(texts.new, NEW_TOKENS))
    for i in range(count):
        logprobs = result.logprobs[i]
        np.testing.assert_allclose(
            logprobs[: len(texts.new[i])], texts.logprobs[i], atol=2e-6, rtol=0
        )
        assert (logprobs[len(texts.new[i]) :] == 0).all()


def assert_same(result, other):
    """The same bits, statistics aside."""
    for name in ("tokens", "lengths", "reasons", "logprobs"):
        np.testing.assert_array_equal(getattr(result, name), getattr(other, name))


def assert_played(result, game):
    """The loop did what the plain queue did, step for step."""
    found = {name: int(getattr(result.statistics, name)) for name in COUNTED}
    expected = dict(game.statistics)
    expected["peak_blocks"] += BLOCKS - game.call.num_blocks
    assert found == expected


@pytest.mark.parametrize("seed", range(12))
def test_random_calls_equal_the_plain_queue(seed):
    rng = np.random.default_rng(seed)
    free_blocks = int(rng.choice([5, 6, 7, 9, 12, 20, 40]))
    free_rows = int(rng.choice([1, 2, 4, 6, 20]))
    num_prompts = int(rng.integers(1, 14))
    nan_every = int(rng.choice([0, 0, 17]))
    call = draw_call(rng, num_prompts, free_blocks, nan_every=nan_every)
    texts = PlainTexts(call)
    game = PlainQueue(call, texts, RUNNING, ROW_COUNTS, free_rows)
    assert game.most_open <= min(RUNNING + 1, free_rows)
    result = run(call, pool(free_blocks, free_rows))
    assert_texts(result, texts)
    assert_played(result, game)
