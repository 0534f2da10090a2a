"""Generation: compared with an eager loop and a dense model; limits, tiny pools.

Compilation dominates the time here, so almost all tests share one set of shapes:
prompts are padded to `ROWS` by `WIDTH`, and other sequences fill the pool to make it
small.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models.small_attention_model import (
    DIM,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    attention_model,
    attention_params,
    dense_rows,
)
from support.small_caches import filled_cache, small_config

import jkv
from jkv import decoding
from jkv.decoding import FinishReason, Sampling

ROWS, WIDTH, NEW_TOKENS, CONTEXT = 8, 32, 12, 30
STATIC = ("model", "max_new_tokens", "max_running", "row_counts")
# One step size for tests of other things: each size is a model to compile.
ONE_SIZE = (ROWS * WIDTH,)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8], [9, 7, 9, 3, 2, 3, 8, 4, 6]]

generate = jax.jit(decoding.generate, static_argnames=STATIC)
begin = jax.jit(decoding.begin, static_argnames=STATIC)
prefill = jax.jit(decoding.prefill, static_argnames=STATIC)
decode = jax.jit(decoding.decode, static_argnames="model")
call = jax.jit(lambda model, *arguments: model(*arguments), static_argnums=0)


def dense_logits(tokens):
    """Return the attention model's logits after a sequence, without jkv: f32[V]."""
    params = jax.tree.map(np.asarray, attention_params())
    return dense_rows(params, np.asarray(tokens))[-1]


# The counting model: token t + 1 follows token t.


def counting_model(_, tokens, cache, batch, *, all_rows=False):
    logits = 9 * jax.nn.one_hot(tokens + 1, 100)
    last = jnp.minimum(batch.last_rows, tokens.shape[0] - 1)
    return (logits if all_rows else logits[last]), cache


def fresh_config(**changes):
    """Return the configuration: 64 blocks of 4 tokens."""
    fields = dict(
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        num_blocks=64,
        block_size=4,
        max_sequences=ROWS + 8,
        max_context_length=CONTEXT,
        record_tokens=True,
    )
    return small_config(**(fields | changes))


def fresh_cache(free_blocks=64, free_rows=ROWS, drafter=None, **changes):
    """Create a cache full of NaN; other sequences hold the blocks and rows in use."""
    config = fresh_config(**changes)
    if drafter is not None:
        config = jkv.with_drafter(config, drafter)
    cache = filled_cache(config)
    # A sequence holds at most eight blocks; every other row is taken.
    taken = np.clip(64 - free_blocks - 8 * np.arange(16), 0, 8)
    taken = np.minimum(4 * taken, CONTEXT)
    taken[16 - free_rows :] = -1  # padding, so that all calls have one shape
    cache, others = jkv.allocate(cache, taken.astype(np.int32))
    jkv.raise_for_status(others, cache)
    assert int(jkv.num_free_blocks(cache)) == free_blocks
    return cache


def padded(prompts, num_rows=ROWS):
    """Return lists of tokens as i32[B, P], padded with -1."""
    prompts = prompts + [[]] * (num_rows - len(prompts))
    return np.array([p + [-1] * (WIDTH - len(p)) for p in prompts], np.int32)


def per_row(num_rows=ROWS, **options):
    """Return a `Sampling` of arrays, so that greedy and sampled tests share a trace."""
    fields = dict(
        temperature=np.float32(0.0),
        top_k=np.int32(0),
        top_p=np.float32(1.0),
        min_p=np.float32(0.0),
        repetition_penalty=np.float32(1.0),
        seeds=np.arange(num_rows, dtype=np.int32),
    )
    assert options.keys() <= fields.keys()
    return Sampling(
        **{
            name: np.broadcast_to(options.get(name, default), (num_rows,)).astype(
                default.dtype
            )
            for name, default in fields.items()
        }
    )


def arguments(prompts, stops=(98, 99), limits=None, **options):
    """Return the arguments of `generate` and `prefill` in the shared shapes."""
    limits = (limits or [NEW_TOKENS] * len(prompts)) + [0] * (ROWS - len(prompts))
    return dict(
        prompts=padded(prompts),
        max_new_tokens=NEW_TOKENS,
        limits=np.array(limits, np.int32),
        stop_tokens=np.array(stops, np.int32),
        sampling=per_row(**options),
    )


def assert_as_before(cache, before):
    """Assert that all blocks and rows are free again and other sequences unchanged."""
    jkv.check(cache)
    assert int(jkv.num_free_blocks(cache)) == int(jkv.num_free_blocks(before))
    np.testing.assert_array_equal(cache.metadata.is_open, before.metadata.is_open)


def run(model, prompts, cache=None, **options):
    """Generate in the shared shapes; return token lists, reasons and statistics."""
    before = fresh_cache() if cache is None else cache
    after, result = complete(prompts, before, model, **options)
    assert_as_before(after, before)
    n = len(prompts)
    return completions(result)[:n], reasons(result)[:n], result.statistics


def complete(prompts, cache, model=attention_model, **options):
    """Generate in the shared shapes, by the program that also runs step by step."""
    values = arguments(prompts, **options)
    sampling, params = values.pop("sampling"), None
    if model is attention_model:
        params = attention_params()
    else:
        values["row_counts"] = ONE_SIZE
    state = begin(model, params, cache, **values)
    cache, state = go_on(model, params, cache, state, sampling)
    return cache, state.result


def go_on(model, params, cache, state, sampling, num_steps=2**31 - 1):
    """Run `num_steps` decode steps."""
    steps = dict(sampling=sampling, num_steps=np.int32(num_steps))
    return decode(model, params, cache, state, **steps)


def completions(result):
    """Return each sequence's new tokens as lists; assert the padding after them."""
    tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
    for row, logprobs, n in zip(tokens, result.logprobs, lengths, strict=True):
        assert (row[n:] == -1).all() and (row[:n] >= 0).all()
        assert (np.asarray(logprobs)[n:] == 0).all()
    return [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]


def reasons(result):
    return [FinishReason(reason).name for reason in np.asarray(result.reasons)]


def run_queue(prompts, cache, salt=0, **options):
    """Generate three at a time in steps of eight rows, with prefix caching."""
    return generate(
        attention_model,
        attention_params(),
        cache,
        **arguments(prompts, **options),
        max_running=3,
        row_counts=(8,),
        salts=np.full(ROWS, salt, np.int32),
    )


@functools.cache
def eager_greedy(prompt):
    """Decode one sequence eagerly, one verb at a time."""
    cache, opened = jkv.allocate(fresh_cache(), [len(prompt)])
    rows, completion = list(prompt), []
    for _ in range(NEW_TOKENS):
        cache, batch = jkv.append(cache, opened.seq_ids, [len(rows)], capacity=9)
        jkv.raise_for_status(batch.status)
        tokens = np.array(rows + [0] * (9 - len(rows)), np.int32)
        logits, cache = call(attention_model, attention_params(), tokens, cache, batch)
        cache = jkv.commit(cache, batch)
        completion.append(int(np.argmax(np.asarray(logits)[0])))
        rows = completion[-1:]
    return completion


def test_greedy_equals_eager_loop_and_dense_model():
    before = fresh_cache()
    cache, result = complete(PROMPTS, before)
    assert_as_before(cache, before)
    assert reasons(result) == ["LENGTH"] * 4 + ["EMPTY_PROMPT"] * 4
    # One prefill step, then one step for each token but the first.
    assert result.statistics.num_steps == 1 + NEW_TOKENS - 1
    assert completions(result)[0] == eager_greedy(tuple(PROMPTS[0]))
    for i, prompt in enumerate(PROMPTS):
        completion = completions(result)[i]
        for n, token in enumerate(completion):
            logits = dense_logits(prompt + completion[:n])
            # The argmax leads by more than twice the tolerance below.
            assert token == np.argmax(logits) and np.diff(np.sort(logits)[-2:]) > 2e-5
            logprob = logits[token] - np.logaddexp.reduce(logits)
            assert abs(logprob - float(result.logprobs[i, n])) < 1e-5
    # The completions differ from each other.
    assert len({tuple(completion) for completion in completions(result)[:4]}) == 4


@pytest.mark.one_end
def test_prefix_caching_saves_work_and_keeps_tokens():
    shared = [
        3,
        1,
        4,
        1,
        5,
        9,
        2,
        6,
    ]  # two blocks, before a token of each prompt's own
    prompts = [[*shared, 10 + i] for i in range(3)]
    expected, _, plain = run(attention_model, prompts)
    assert int(plain.cached_tokens) == 0
    cache = fresh_cache(prefix_caching=True)
    for salts, cached_tokens in ((0, 0), (0, 3 * 8), (5, 0), (5, 3 * 8)):
        cache, result = run_queue(prompts, cache, salts)
        jkv.check(cache)
        assert completions(result)[:3] == expected
        assert int(result.statistics.cached_tokens) == cached_tokens
        assert int(result.statistics.prompt_tokens) == 27 - cached_tokens
        # Eight rows a step, one for each sequence and the rest for the oldest: 6 1 1, 3
        # 4 1, then 1 4 3 and 1 1 4 with the first new tokens.
        steps = (1 if cached_tokens else 4) + NEW_TOKENS - 1
        assert int(result.statistics.num_steps) == steps
        assert int(jkv.num_free_blocks(cache)) == 64


@pytest.mark.parametrize("options", [{}, dict(temperature=1.5, top_p=0.9)])
@pytest.mark.one_end
def test_a_sequence_does_not_depend_on_its_batch(options):
    seeds = np.array([11, 5, 8, 2, 0, 0, 0, 0], np.int32)
    together, *_ = run(attention_model, PROMPTS, seeds=seeds, **options)
    # In another order, with other neighbours.
    order = np.array([2, 0, 3, 1, 4, 5, 6, 7])
    moved, *_ = run(
        attention_model, [PROMPTS[i] for i in order[:4]], seeds=seeds[order], **options
    )
    assert moved == [together[i] for i in order[:4]]
    # Alone, in small chunks.
    for prompt, seed, completion in zip(PROMPTS, seeds, together, strict=False):
        _, result = run_queue(
            [prompt], fresh_cache(prefix_caching=True), seeds=seed, **options
        )
        assert completions(result)[0] == completion


@pytest.mark.one_end
def test_nan_logits_end_only_their_sequence():
    """A token that only some completions choose overflows; attention runs in loops."""
    model = functools.partial(attention_model, implementation="xla")
    sound, prompts = attention_params(), [[*PROMPTS[i % 4], i] for i in range(ROWS)]
    values = arguments(prompts) | dict(row_counts=ONE_SIZE)
    expected = completions(generate(model, sound, fresh_cache(), **values)[1])
    prompted = {token for prompt in prompts for token in prompt}
    (token, *_) = (t for t in expected[0][1:6] if t not in prompted)
    embedding = np.array(sound["embedding"])
    embedding[token] = np.inf
    broken = dict(sound, embedding=jax.device_put(embedding))
    _, result = generate(model, broken, fresh_cache(), **values)
    # A sequence ends in the step that reads the chosen token.
    ends = [[*completion, token].index(token) + 1 for completion in expected]
    assert completions(result) == [
        completion[:n] for completion, n in zip(expected, ends, strict=True)
    ]
    why = ["NAN_LOGITS" if n < NEW_TOKENS else "LENGTH" for n in ends]
    assert reasons(result) == why and {*why} == {"NAN_LOGITS", "LENGTH"}


@pytest.mark.one_end  # the newest JAX runs the tests of the queue
def test_continuous_batching_preserves_the_completions_of_a_real_model():
    options = dict(temperature=[0.0, 1.0, 0.0, 1.5] + [0.0] * 4)
    options |= dict(repetition_penalty=[1.0, 1.0, 1.4, 1.3] + [1.0] * 4)
    _, wide = complete(PROMPTS, fresh_cache(), stops=(2, 99), **options)
    preemptions = []
    for free_blocks in (64, 9, 6):
        before = fresh_cache(free_blocks, free_rows=ROWS - 1, prefix_caching=True)
        cache, queued = run_queue(PROMPTS, before, stops=(2, 99), **options)
        assert_as_before(cache, before)
        assert (completions(queued), reasons(queued)) == (
            completions(wide),
            reasons(wide),
        )
        np.testing.assert_allclose(queued.logprobs, wide.logprobs, atol=1e-5)
        preemptions.append(int(queued.statistics.preemptions))
    assert preemptions[0] == 0 and preemptions[2] > 0


@pytest.mark.one_end
def test_seeds_change_only_sampled_tokens():
    hot = dict(temperature=2.0)
    first, *_ = run(attention_model, PROMPTS, **hot)
    again, *_ = run(attention_model, PROMPTS, **hot)
    other, *_ = run(attention_model, PROMPTS, seeds=np.arange(50, 58, dtype=np.int32))
    hotter, *_ = run(
        attention_model, PROMPTS, seeds=np.arange(50, 58, dtype=np.int32), **hot
    )
    greedy, *_ = run(attention_model, PROMPTS)
    assert first == again and other == greedy
    assert all(a != b for a, b in zip(first, hotter, strict=True))


@pytest.mark.one_end
def test_stop_tokens_limits_and_the_end_of_the_context():
    prompts = [[5], [20, 21], [30], [40] * 26, [50] * 30, [60] * 31, []]
    found, why, statistics = run(
        counting_model, prompts, stops=(7, 99), limits=[9, 3, 0, 9, 9, 9, 9]
    )
    assert [*zip(found, why, strict=True)] == [
        ([6, 7], "STOP"),  # the stop token is kept
        ([22, 23, 24], "LENGTH"),
        ([], "LENGTH"),
        ([41, 42, 43, 44, 45], "CONTEXT_FULL"),  # 45 has no slot, and needs none
        ([51], "CONTEXT_FULL"),
        ([], "CONTEXT_FULL"),  # the prompt exceeds the context
        ([], "EMPTY_PROMPT"),
    ]
    # One prefill step, then the steps of the longest completion.
    assert statistics.num_steps == 1 + 4


@pytest.mark.one_end
def test_a_stop_token_at_the_limit_is_a_stop():
    found = run(counting_model, [[5], [90]], stops=(7, 91), limits=[2, 12])
    assert found[:2] == ([[6, 7], [91]], ["STOP", "STOP"])


@pytest.mark.one_end
def test_more_prompts_than_rows():
    cache = fresh_cache(free_rows=2)
    found, why, _ = run(counting_model, [[1], [], [2], [3]], cache, limits=[3] * 4)
    # The last one waits for a row.
    assert found == [[2, 3, 4], [], [3, 4, 5], [4, 5, 6]]
    assert why == ["LENGTH", "EMPTY_PROMPT", "LENGTH", "LENGTH"]


@pytest.mark.one_end
def test_without_rows_no_prompt_starts():
    found, why, statistics = run(counting_model, [[1], []], fresh_cache(free_rows=0))
    assert (found, why) == ([[], []], ["OUT_OF_SEQUENCES", "EMPTY_PROMPT"])
    assert statistics.num_steps == 0


@pytest.mark.one_end
def test_one_sequence_larger_than_the_pool():
    found, why, statistics = run(counting_model, [[1, 2, 3]], fresh_cache(2))
    # Eight slots: three for the prompt, five for new tokens; the last token needs none.
    assert (found, why) == ([[4, 5, 6, 7, 8, 9]], ["OUT_OF_BLOCKS"])
    assert statistics.peak_blocks == 64


@pytest.mark.one_end
def test_a_pool_of_exactly_one_sequence_makes_progress():
    found, why, _ = run(counting_model, [[1, 2, 3]], fresh_cache(2), limits=[6])
    assert (found, why) == ([[4, 5, 6, 7, 8, 9]], ["LENGTH"])


@pytest.mark.one_end
def test_without_blocks_no_prompt_starts():
    found, why, _ = run(counting_model, [[1], [2]], fresh_cache(0))
    assert (found, why) == ([[], []], ["OUT_OF_BLOCKS"] * 2)


@pytest.mark.one_end
def test_the_youngest_are_preempted_if_blocks_run_out():
    # Four sequences of one block each need a second one at once, and none is free.
    found, why, statistics = run(
        counting_model, [[10], [20], [30], [40]], fresh_cache(4), limits=[8] * 4
    )
    assert why == ["LENGTH"] * 4
    assert found == [list(range(n, n + 8)) for n in (11, 21, 31, 41)]
    # The last two were preempted, and recomputed three of their four tokens.
    assert (statistics.preemptions, statistics.recomputed_tokens) == (2, 6)
    assert statistics.prompt_tokens == 4 + 2


@pytest.mark.one_end
def test_a_sequence_waits_for_the_blocks_of_a_finished_one():
    # Both need 3 blocks in the end: 4 suffice one after the other, and completions
    # equal those of a large pool.
    limits = [6, 12]
    tight = run(attention_model, PROMPTS[:2], fresh_cache(4), limits=limits)
    wide = run(attention_model, PROMPTS[:2], limits=limits)
    assert tight[:2] == wide[:2]
    assert tight[1] == ["LENGTH", "LENGTH"]
    # It waited: the same tokens took more steps.
    assert tight[2].num_steps > wide[2].num_steps


@pytest.mark.one_end
def test_a_prompt_that_does_not_fit_ends_and_others_continue():
    prompts = [[1, 2, 3], [10] * 20, [30, 31]]
    found, why, _ = run(counting_model, prompts, fresh_cache(4), limits=[4] * 3)
    assert why == ["LENGTH", "OUT_OF_BLOCKS", "LENGTH"]
    assert found == [[4, 5, 6, 7], [], [32, 33, 34, 35]]


@pytest.mark.one_end
def test_any_pool_ends_every_sequence_with_a_reason():
    options = dict(temperature=1.0, stops=(0, 1))
    wide, *_ = run(attention_model, PROMPTS, **options)
    num_whole = []
    for free_blocks in range(19):
        found, why, _ = run(
            attention_model, PROMPTS, fresh_cache(free_blocks), **options
        )
        for completion, reason, full, prompt in zip(
            found, why, wide, PROMPTS, strict=True
        ):
            # A completion is truncated if its next token finds no block although it is
            # alone; it never changes.
            slots = 4 * free_blocks - len(prompt)
            fits = max(0, slots + 1) if slots >= 0 else 0
            assert completion == full[:fits] and reason != "RUNNING"
            assert (reason == "OUT_OF_BLOCKS") == (len(full) > fits)
        num_whole.append(sum(reason != "OUT_OF_BLOCKS" for reason in why))
    assert num_whole == sorted(num_whole) and set(num_whole) == {0, 2, 4}


@pytest.mark.one_end
def test_other_sequences_of_the_cache_are_unchanged():
    cache, opened = jkv.allocate(fresh_cache(free_rows=9), [0])
    cache, batch = jkv.append(cache, opened.seq_ids, [6], capacity=9)
    _, cache = call(
        attention_model, attention_params(), np.arange(9, dtype=np.int32), cache, batch
    )
    before = [np.asarray(a) for a in jkv.read(cache, 1, opened.seq_ids[0])]
    assert before[2] == 6 and np.isfinite(before[0][:6]).all()
    cache, _ = complete(PROMPTS, cache)
    after = [np.asarray(a) for a in jkv.read(cache, 1, opened.seq_ids[0])]
    for old, new in zip(before[:2], after[:2], strict=True):
        np.testing.assert_array_equal(old[:6], new[:6])
    assert after[2] == 6


@pytest.mark.one_end
def test_statistics_include_the_peak_step():
    *_, statistics = run(counting_model, [[1] * 5, [2]], limits=[3, 3])
    # 5 and 1 tokens in blocks of four: 2 and 1 blocks with 3 and 3 empty slots; the
    # next two steps need no other block.
    assert (statistics.num_steps, statistics.cached_tokens) == (3, 0)
    assert (statistics.peak_blocks, statistics.empty_slots) == (3, 6)
    # Each step had rows for both: six prompt tokens, then one token each.
    assert (statistics.sequence_steps, statistics.prompt_tokens) == (6, 6)
    assert statistics.internal_fragmentation(4) == 0.5


@pytest.mark.one_end
def test_steps_from_the_host_equal_one_call():
    options = dict(stops=(2, 3), temperature=1.0, repetition_penalty=1.2)
    params, before = attention_params(), fresh_cache()
    _, whole = complete(PROMPTS, before, **options)
    options = arguments(PROMPTS, **options)
    cache, state = prefill(attention_model, params, before, **options)
    shown = completions(state.result)
    assert [len(completion) for completion in shown] == [1] * 4 + [0] * 4
    while state.is_running.any():
        cache, state = go_on(
            attention_model, params, cache, state, options["sampling"], 2
        )
        jkv.check(cache)
        grown = completions(state.result)
        assert all(g[: len(s)] == s for g, s in zip(grown, shown, strict=True))
        shown = grown
    chex.assert_trees_all_equal(state.result, whole)
    assert_as_before(cache, before)


@pytest.mark.one_end
def test_a_generation_can_be_stopped_at_any_step():
    whole, *_ = run(attention_model, PROMPTS)
    # Token 2 stops the third completion at once, the second at its fifth token.
    assert [(completion + [2]).index(2) for completion in whole] == [4, 4, 1, 8]
    options, params = arguments(PROMPTS, stops=(2, 99)), attention_params()
    sampling, before = options["sampling"], fresh_cache()

    def two_steps(cache, state):
        return go_on(attention_model, params, cache, state, sampling, 2)

    cache, state = two_steps(*prefill(attention_model, params, before, **options))
    # Stopped sequences are closed already: their ids are padding.
    assert state.is_running.tolist() == [True, True, False, True] + [False] * 4
    # If the cache records tokens, these are the tokens fed to the model.
    recorded = jkv.tokens(cache, state.seq_ids[1]).tolist()
    assert recorded[:4] == [*PROMPTS[1], *whole[1][:2], -1]
    # After freeing one sequence, the next step skips it and the others continue.
    cache, status = jkv.free(cache, state.seq_ids[:1])
    jkv.raise_for_status(status)
    cache, state = two_steps(cache, state)
    assert reasons(state.result)[:4] == ["CANCELLED", "STOP", "STOP", "RUNNING"]
    lengths = [3, 5, 2, 5]
    expected = [completion[:n] for completion, n in zip(whole, lengths, strict=True)]
    assert completions(state.result)[:4] == expected
    # Then free the remaining ones.
    cache, status = jkv.free(cache, state.seq_ids)
    jkv.raise_for_status(status)
    assert_as_before(cache, before)


@pytest.mark.one_end
def test_repetition_penalty_covers_prompt_and_new_tokens():
    prompt = PROMPTS[3]
    (completion,), *_ = run(attention_model, [prompt], repetition_penalty=3.0)
    for n, token in enumerate(completion):
        logits = dense_logits(prompt + completion[:n])
        seen = np.isin(np.arange(VOCABULARY), prompt + completion[:n])
        penalised = np.where(logits < 0, logits * 3, logits / 3)
        assert token == np.argmax(np.where(seen, penalised, logits))
    plain, *_ = run(attention_model, [prompt])
    assert plain != [completion]


def test_one_trace_however_values_change():
    jitted = jax.jit(
        chex.assert_max_traces(decoding.generate, n=1), static_argnames=STATIC
    )
    cache = fresh_cache()
    for step in range(3):
        jax.eval_shape(
            functools.partial(
                jitted, counting_model, max_new_tokens=5, row_counts=(8,)
            ),
            None,
            cache,
            padded([[step] * (step + 1), [10]], num_rows=2),
            limits=np.array([step, 5]),
            stop_tokens=(step + 12,),
            sampling=Sampling(temperature=0.1 * step, top_k=step, seeds=step),
        )


@pytest.mark.one_end
def test_invalid_arguments_are_named():
    start = functools.partial(
        decoding.generate, counting_model, None, fresh_cache(), row_counts=(8,)
    )
    one = jnp.asarray(padded([[1]], num_rows=1))
    with pytest.raises(ValueError, match=r"i32\[B, P\].*got int32\[3\]"):
        start(jnp.arange(3, dtype=jnp.int32), max_new_tokens=1)
    with pytest.raises(ValueError, match="got float32"):
        start(jnp.ones((1, 3), jnp.float32), max_new_tokens=1)
    for name in ("max_new_tokens", "num_samples", "max_running", "chunk_size"):
        with pytest.raises(ValueError, match=f"{name} must be a static int"):
            start(one, **({"max_new_tokens": 1} | {name: 0}))
    for counts in ((), (4, 2), (2, 2, 4), (1,), (0, 4)):
        with pytest.raises(ValueError, match="row_counts must"):
            start([[1], [2]], max_new_tokens=1, max_running=2, row_counts=counts)
    with pytest.raises(ValueError, match="prompts is empty; give at least one"):
        start([], max_new_tokens=1)
    # An empty prompt cannot start, but is not an error.
    _, result = jax.eval_shape(lambda: start([[], []], max_new_tokens=1))
    assert result.reasons.shape == (2,)
    with pytest.raises(ValueError, match=r"stop_sequences must be i32\[F, C\]"):
        start(one, max_new_tokens=1, stop_sequences=np.int32([1, 2]))
    with pytest.raises(ValueError, match=r"\[B, V\] with B = 1.*got float32\[2, 100\]"):
        # Logits of rows instead of sequences.
        model = functools.partial(counting_model, all_rows=True)
        decoding.generate(model, None, fresh_cache(), one, max_new_tokens=1)
    with pytest.raises(ValueError, match="'limits': 2, 'prompts': 1"):
        start(one, max_new_tokens=1, limits=jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match="Sampling.temperature"):
        jax.eval_shape(
            lambda: start(
                one, max_new_tokens=1, sampling=Sampling(temperature=jnp.ones(2))
            )
        )
