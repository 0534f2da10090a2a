"""Continuous batching, compared with a plain-Python generator and scheduler.

One compiled loop serves nearly all tests: 1,008 sequences of three samples each, five
running at a time. Only values vary: prompts, limits, blocks held by other sequences,
stop conditions, the frequency of NaN logits.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support.compiled_hlo import (
    ALL_PASSES,
    in_the_steps_of_a_loop,
    pool_sized_operations,
)
from support.decoding.plain_queue import (
    VOCABULARY,
    Call,
    PlainCompletions,
    PlainQueue,
    hash_model,
)
from support.jax_versions import dealt
from support.small_caches import copied, small_cache

import jkv
from jkv import decoding
from jkv.decoding import FinishReason, Sampling

PROMPTS, SAMPLES, WIDTH, NEW_TOKENS = 336, 3, 10, 12
CONTEXT, BLOCK_SIZE, BLOCKS, ROWS = 20, 4, 64, 24
RUNNING, ROW_COUNTS = 5, (5, 13)  # no other size is 13
HEAD_DIM = 512  # the model needs 2; the pool exceeds any other array
STATIC = (
    "model",
    "max_new_tokens",
    "num_samples",
    "max_running",
    "chunk_size",
    "row_counts",
)
# Statistics that the plain queue also counts.
COUNTED = (
    "num_steps sequence_steps prompt_tokens recomputed_tokens preemptions "
    "peak_blocks queue_steps idle_places"
).split()

generate = jax.jit(decoding.generate, static_argnames=STATIC)
begin = jax.jit(decoding.begin, static_argnames=STATIC)
add_prompts, cancel = jax.jit(decoding.add_prompts), jax.jit(decoding.cancel)


@functools.cache
def pool(free_blocks=BLOCKS, free_rows=ROWS, **changes):
    """Create a pool full of NaN, in which other sequences hold the rest."""
    fields = dict(
        num_layers=1,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        max_sequences=ROWS + 16,
        max_context_length=CONTEXT,
    )
    cache = small_cache(**(fields | changes))
    rows = ROWS + 16
    taken = np.clip(BLOCKS - free_blocks - 5 * np.arange(rows, dtype=np.int32), 0, 5)
    taken = np.where(np.arange(rows) < rows - free_rows, BLOCK_SIZE * taken, -1)
    cache, others = jkv.allocate(cache, taken.astype(np.int32))
    jkv.raise_for_status(others, cache)
    assert int(jkv.num_free_blocks(cache)) == free_blocks
    return cache


def draw_call(rng, num_prompts, free_blocks=BLOCKS, **changes):
    """Draw a random call; prompts past `num_prompts` are empty."""
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


def replaced(call, **changes):
    return dataclasses.replace(call, **changes)


def padded(rows, width):
    return np.array([[*row, *[-1] * (width - len(row))] for row in rows], np.int32)


def arguments(call, max_running=RUNNING, row_counts=ROW_COUNTS):
    """Return the arguments of `generate` and `prefill` after the cache."""
    return dict(
        prompts=padded(call.prompts, WIDTH),
        max_new_tokens=call.max_new_tokens,
        limits=np.array(call.limits, np.int32),
        stop_tokens=np.array(call.stop_tokens, np.int32),
        stop_sequences=padded(call.stop_sequences, 3),
        sampling=call.sampling,
        num_samples=call.num_samples,
        max_running=max_running,
        row_counts=row_counts,
    )


def begun(call, cache, **options):
    """Return the state of a call before its first step."""
    values = arguments(call, **options)
    del values["sampling"]
    return begin(hash_model, np.uint32(0), cache, **values)


@functools.cache
def compiled():
    """Compile the loop that nearly all tests share, with donated cache and state."""
    call, cache = draw_call(np.random.default_rng(0), 1), pool()
    jitted = jax.jit(
        decoding.decode, static_argnames="model", donate_argnames=("cache", "state")
    )
    options = dict(sampling=call.sampling, num_steps=np.int32(0))
    state = begun(call, cache)
    return jitted.lower(hash_model, np.uint32(0), cache, state, **options).compile(
        ALL_PASSES
    )


def decode(call, cache, state, num_steps=2**31 - 1):
    """Run `num_steps` decode steps, donating cache and state."""
    options = dict(sampling=call.sampling, num_steps=np.int32(num_steps))
    return compiled()(np.uint32(call.nan_every), cache, state, **options)


def run(call, cache):
    """Generate with the hash model, and assert that blocks and rows are released."""
    after, state = decode(call, copied(cache), begun(call, cache))
    assert_released(cache, after)
    return jax.device_get(state.result)


def assert_released(before, after):
    """Assert that blocks and rows are free again and other sequences unchanged."""
    jkv.check(after)
    assert int(jkv.num_free_blocks(after)) == int(jkv.num_free_blocks(before))
    np.testing.assert_array_equal(after.metadata.is_open, before.metadata.is_open)


def assert_completions(result, alone):
    """Assert equal tokens and reasons, and close log-probabilities."""
    count = len(alone.new)
    assert [FinishReason(r).name for r in result.reasons] == [
        r.name for r in alone.reasons
    ]
    np.testing.assert_array_equal(result.lengths, [len(new) for new in alone.new])
    np.testing.assert_array_equal(result.tokens, padded(alone.new, NEW_TOKENS))
    for i in range(count):
        logprobs = result.logprobs[i]
        np.testing.assert_allclose(
            logprobs[: len(alone.new[i])], alone.logprobs[i], atol=2e-6, rtol=0
        )
        assert (logprobs[len(alone.new[i]) :] == 0).all()


def assert_same(result, other):
    """Assert bit-identical results; statistics may differ."""
    for name in ("tokens", "lengths", "reasons", "logprobs"):
        np.testing.assert_array_equal(getattr(result, name), getattr(other, name))


def assert_played(result, game):
    """Assert that the loop's statistics equal the plain queue's."""
    found = {name: int(getattr(result.statistics, name)) for name in COUNTED}
    expected = dict(game.statistics)
    expected["peak_blocks"] += BLOCKS - game.call.num_blocks
    assert found == expected


@pytest.mark.newest_further
@pytest.mark.parametrize("seed", dealt(range(12), share=12))
def test_random_calls_equal_the_plain_queue(seed):
    rng = np.random.default_rng(seed)
    free_blocks = int(rng.choice([5, 6, 7, 9, 12, 20, 40]))
    free_rows = int(rng.choice([1, 2, 4, 6, 20]))
    num_prompts = int(rng.integers(1, 14))
    nan_every = int(rng.choice([0, 0, 17]))
    call = draw_call(rng, num_prompts, free_blocks, nan_every=nan_every)
    alone = PlainCompletions(call)
    game = PlainQueue(call, alone, RUNNING, ROW_COUNTS, free_rows)
    assert game.most_open <= min(RUNNING + 1, free_rows)
    result = run(call, pool(free_blocks, free_rows))
    assert_completions(result, alone)
    assert_played(result, game)


@pytest.mark.one_end
def test_samples_of_a_prompt_share_its_blocks():
    call = draw_call(np.random.default_rng(3), 1)
    call.prompts[0], call.limits[0] = [9, 7, 9, 3, 2, 3, 8, 4, 6], 7
    call.stop_tokens[:] = [VOCABULARY] * 2
    call.stop_sequences[:] = [[]] * 4
    call.sampling.temperature[:SAMPLES] = 1.5
    alone = PlainCompletions(call)
    result = run(call, pool())
    assert_completions(result, alone)
    assert len({tuple(new) for new in alone.new[:SAMPLES]}) == SAMPLES
    # 15 tokens need four blocks; two of the prompt's are shared.
    assert result.statistics.peak_blocks == 2 + SAMPLES * 2
    assert result.statistics.prompt_tokens == 9


@pytest.mark.further
@pytest.mark.one_end
def test_a_thousand_sequences_equal_their_solo_runs():
    rng = np.random.default_rng(100)
    call = draw_call(rng, PROMPTS, num_blocks=9, nan_every=301)
    prompts = PlainCompletions(call)
    game = PlainQueue(call, prompts, RUNNING, ROW_COUNTS)
    result = run(call, pool(9))
    assert_completions(result, prompts)
    assert_played(result, game)
    assert {FinishReason(r).name for r in result.reasons} == {
        "STOP",
        "LENGTH",
        "CONTEXT_FULL",
        "NAN_LOGITS",
    }
    statistics = result.statistics
    assert statistics.preemptions > 10 and statistics.recomputed_tokens > 100
    # A prompt is computed once for its three samples, except after preemption.
    assert game.statistics["prompt_tokens"] < 1.2 * sum(map(len, call.prompts))
    # A pool of any size gives the same bits.
    assert_same(run(call, pool()), result)
    # So do other numbers of running places and rows, runs without samples, and prefix
    # cache hits.
    cache = pool(12, prefix_caching=True)
    several = [[prompt] * SAMPLES for prompt in call.prompts]
    apart = replaced(
        call,
        prompts=[prompt for prompts in several for prompt in prompts],
        limits=np.repeat(call.limits, SAMPLES).tolist(),
        num_samples=1,
    )
    after, found = generate(
        hash_model,
        np.uint32(call.nan_every),
        cache,
        **arguments(apart, max_running=8, row_counts=(11,)),
        salts=np.arange(PROMPTS * SAMPLES, dtype=np.int32) % 2,
    )
    assert_released(cache, after)
    assert_same(jax.device_get(found), result)
    assert found.statistics.preemptions > 10
    assert found.statistics.cached_tokens > 500


@pytest.mark.newest_further
def test_the_loop_updates_the_pool_in_place():
    cache = pool()
    assert pool_sized_operations(compiled(), cache.storage[0].key_pool.size) == []
    memory = compiled().memory_analysis()
    assert memory.temp_size_in_bytes < cache.storage[0].key_pool.nbytes
    assert memory.alias_size_in_bytes >= 2 * cache.storage[0].key_pool.nbytes
    # A decode step plans the rows of prompts but computes nothing for them: XLA has not
    # hoisted the work of the inner loop.
    planned = in_the_steps_of_a_loop(compiled().as_text(), str(ROW_COUNTS[1]))
    moved = [line for line in planned if line.count("while/body") > 1]
    assert planned and moved == []


def test_donated_loops_release_all_memory():
    call, cache, counts = draw_call(np.random.default_rng(4), 3), copied(pool()), []
    for _ in range(4):
        given = cache
        cache, state = decode(call, cache, begun(call, cache))
        assert given.storage[0].key_pool.is_deleted()
        assert given.metadata.groups[0].block_tables.is_deleted()
        del given, state
        counts.append(len(jax.live_arrays()))
    assert counts[0] == counts[-1]
    assert_released(pool(), cache)


@pytest.mark.one_end
def test_oversized_sequences_end_without_blocking_others():
    rng = np.random.default_rng(7)
    call = draw_call(rng, 9, num_blocks=3)
    call.limits[:] = [NEW_TOKENS] * PROMPTS
    call.stop_tokens[:] = [VOCABULARY] * 2
    call.stop_sequences[:] = [[]] * 4
    alone = PlainCompletions(call)
    result = run(call, pool(3))
    assert_completions(result, alone)
    assert_played(result, PlainQueue(call, alone, RUNNING, ROW_COUNTS))
    # Twelve slots: a sequence ends with the token that finds none.
    ended = (
        np.repeat([len(prompt) for prompt in call.prompts], SAMPLES) + result.lengths
    )
    is_out = result.reasons == FinishReason.OUT_OF_BLOCKS
    assert is_out.sum() > 9 and (ended[is_out] == 13).all()


@pytest.mark.one_end
def test_windows_with_cancellation_and_added_prompts():
    """Sequences equal one call's, however the host changes the queue."""
    rng = np.random.default_rng(11)
    call = draw_call(rng, 30, num_blocks=12)
    alone = PlainCompletions(call)
    cache, slots = copied(pool(12)), np.full(8, -1, np.int32)
    state = begun(replaced(call, prompts=[[]] * PROMPTS), cache)
    left, cancelled, num_windows = list(range(30)), set(), 0
    while left or state.is_running.any():
        # Add a few at a time, in the order of their slots, which fixes their seeds.
        now, left = left[:4], left[4:]
        slots[:] = [*now, *[-1] * (8 - len(now))]
        added = [call.prompts[i] for i in now] + [[]] * (8 - len(now))
        limits = [call.limits[i] for i in now] + [0] * (8 - len(now))
        state = add_prompts(
            cache, state, slots, padded(added, WIDTH), limits=np.int32(limits)
        )
        chosen = np.zeros(PROMPTS * SAMPLES, bool)
        if num_windows % 3 == 2:
            chosen[rng.choice(90, 12, replace=False)] = True
            cancelled |= set(np.flatnonzero(chosen & np.asarray(state.is_running)))
        cache, state = cancel(cache, state, chosen)
        cache, state = decode(call, cache, state, num_steps=3)
        jkv.check(cache)
        num_windows += 1
        assert num_windows < 400
    result = jax.device_get(state.result)
    assert len(cancelled) > 20
    for i in range(90):
        tokens = result.tokens[i][: result.lengths[i]].tolist()
        assert tokens == alone.new[i][: len(tokens)]
        if i in cancelled:
            assert result.reasons[i] == FinishReason.CANCELLED
        else:
            assert result.reasons[i] == alone.reasons[i]
            assert tokens == alone.new[i]
    assert_released(pool(12), cache)


@pytest.mark.one_end
def test_stop_conditions_of_added_prompts_keep_their_shape():
    call, cache = draw_call(np.random.default_rng(0), 1), pool()
    values = arguments(call)
    del values["sampling"]
    tokens = np.ones((PROMPTS, 2), np.int32)
    sequences = np.ones((PROMPTS, 4, 3), np.int32)
    own = values | dict(stop_tokens=tokens, stop_sequences=sequences)

    def start(values):
        return decoding.begin(hash_model, np.uint32(0), cache, **values)

    def add(state, **stops):
        prompts = np.ones((2, WIDTH), np.int32)
        return decoding.add_prompts(cache, state, [1, 2], prompts, **stops)

    def try_to(values, **stops):
        state = jax.eval_shape(lambda: start(values))
        return jax.eval_shape(lambda state: add(state, **stops), state)

    both = dict(stop_tokens=tokens[:2], stop_sequences=sequences[:2])
    assert try_to(own, **both).stops.tokens.shape == (PROMPTS, 2)
    assert try_to(values).stops.tokens.shape == (1, 2)
    words = "must have the shape of the first call"
    for wrong in (
        both | dict(stop_tokens=tokens[:2, :1]),
        dict(stop_tokens=tokens[:2]),
    ):
        with pytest.raises(ValueError, match=words):
            try_to(own, **wrong)
    with pytest.raises(ValueError, match=words):
        try_to(values, **both)  # they apply to all prompts
    with pytest.raises(ValueError, match=f"one row for each of {PROMPTS} prompts"):
        try_to(values | dict(stop_tokens=tokens[:3]))


@pytest.mark.one_end
def test_limits_of_added_prompts_may_be_a_list_in_jit():
    call, cache = draw_call(np.random.default_rng(0), 1), pool()
    values = arguments(call)
    del values["sampling"]

    def add(limits):
        state = decoding.begin(hash_model, np.uint32(0), cache, **values)
        prompts = np.ones((2, WIDTH), np.int32)
        state = decoding.add_prompts(cache, state, [1, 2], prompts, limits=limits)
        return state.prompts.limits

    for limits in ([1, 2], (1, 2), np.array([1, 2], np.int32), 2):
        assert jax.eval_shape(add, limits).shape == (PROMPTS,)
    with pytest.raises(ValueError, match="'limits': 1, 'prompts': 2"):
        jax.eval_shape(add, [1])


@pytest.mark.one_end
def test_row_counts_are_spread_from_the_least_to_the_largest():
    """Also for one or two sequences: sizes are rounded, and never 0 rows."""
    for running in (1, 2, 3, 7, 64):
        for rows in (1, 2, 12, 64, 128, 140, 512):
            counts = decoding.spread_row_counts(running, rows)
            assert counts[0] == running and counts[-1] == max(running, rows)
            assert list(counts) == sorted(set(counts))
