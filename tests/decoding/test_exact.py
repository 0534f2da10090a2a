"""Tests of `exact=`: results are bit-identical, whatever else is in the batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models.small_attention_model import (
    VOCABULARY,
    attention_model,
    attention_params,
)
from support.small_caches import with_free_blocks

import jkv
from jkv.decoding import PromptLookup, Sampling, begin, decode
from jkv.serving import Engine

EXACT, NEW = (6, 10), 9
LENGTHS = (5, 17, 1, 9, 12, 3)
CONFIG = jkv.CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=4,
    num_blocks=34,
    block_size=4,
    max_sequences=8,
    max_context_length=40,
    prefix_caching=True,
    dtype=jnp.float32,
)
SHAPES = ("model", "max_new_tokens", "max_running", "num_samples", "exact")
generate = jax.jit(jkv.generate, static_argnames=SHAPES)
start = jax.jit(begin, static_argnames=SHAPES)


def make_prompts():
    """Return padded prompts, so that any order uses one program."""
    rng = np.random.default_rng(8)
    prompts = np.full((6, max(LENGTHS)), -1, np.int32)
    for row, length in zip(prompts, LENGTHS, strict=True):
        row[:length] = rng.integers(VOCABULARY, size=length)
    prompts[4, :8] = prompts[1, :8]
    return prompts


def run(prompts, seeds, cache=None, **options):
    cache = jkv.init(CONFIG) if cache is None else cache
    options = {"exact": EXACT, "max_running": 6, **options}
    sampling = Sampling(temperature=0.8, seeds=jnp.asarray(seeds, jnp.int32))
    return generate(
        attention_model,
        attention_params(),
        cache,
        prompts,
        max_new_tokens=NEW,
        sampling=sampling,
        **options,
    )


@pytest.fixture(scope="module")
def known():
    """The results of all prompts in one call."""
    return run(make_prompts(), range(6))[1]


def assert_same_bits(found, known, rows=slice(None)):
    for name in ("tokens", "logprobs"):
        one, other = (np.asarray(getattr(each, name)) for each in (found, known))
        bits = one.view(np.int32), other[rows].view(np.int32)
        np.testing.assert_array_equal(*bits, err_msg=name)


ORDER = np.array([3, 0, 5, 1, 4, 2])


@pytest.mark.further
@pytest.mark.one_end
def test_results_do_not_depend_on_order_and_number(known):
    found = run(make_prompts()[ORDER], ORDER, max_running=3)[1]
    assert_same_bits(found, known, ORDER)


@pytest.mark.further
def test_steps_without_exact_differ_in_bits(known):
    """The previous test can fail."""
    usual = run(make_prompts()[ORDER], ORDER, max_running=3, exact=False)[1]
    assert (np.asarray(usual.logprobs) != np.asarray(known.logprobs)[ORDER]).any()


@pytest.mark.further
@pytest.mark.one_end
def test_hits_and_recomputation_are_bit_identical(known):
    warm, _ = run(make_prompts(), range(6))
    _, found = run(make_prompts(), range(6), warm)
    assert int(found.statistics.cached_tokens) > 20
    assert_same_bits(found, known)
    scarce = with_free_blocks(jkv.init(CONFIG), 14)
    _, found = run(make_prompts(), range(6), scarce)
    assert int(found.statistics.recomputed_tokens) > 0
    assert_same_bits(found, known)


@pytest.mark.further
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_up_to_64_prompts(dtype):
    """Also with bfloat16 weights, forward only."""
    count, new, width = 64, 5, 11
    random = np.random.default_rng(9)
    lengths = random.integers(1, width + 1, (count, 1))
    prompts = random.integers(VOCABULARY, size=(count, width))
    prompts = np.where(np.arange(width) < lengths, prompts, -1).astype(np.int32)
    config = dataclasses.replace(
        CONFIG, num_blocks=count * 4, max_sequences=count + 1, dtype=dtype
    )
    params = jax.tree.map(lambda array: array.astype(dtype), attention_params())

    def play(rows, **options):
        return generate(
            attention_model,
            params,
            jkv.init(config),
            prompts[rows],
            max_new_tokens=new,
            sampling=Sampling(temperature=0.8, seeds=jnp.asarray(rows, jnp.int32)),
            **options,
        )[1]

    order = random.permutation(count)
    known = play(np.arange(count), max_running=count, exact=True)
    for most in (1, 33) if dtype == jnp.float32 else (7,):
        found = play(order, max_running=most, exact=True)
        assert_same_bits(found, known, order)
    score = jax.jit(jkv.score, static_argnames=("model", "config", "exact"))
    given = prompts, known.tokens
    found = score(attention_model, params, *given, config=config, exact=True)
    np.testing.assert_array_equal(found, known.logprobs)


@pytest.mark.further  # single-prompt loops are tested above
@pytest.mark.one_end
def test_samples_equal_repeated_prompts():
    prompts = make_prompts()[:3]
    _, samples = run(prompts, range(6), num_samples=2)
    _, found = run(prompts.repeat(2, axis=0), range(6), max_running=3)
    assert_same_bits(found, samples)


def score(params, continuations, exact):
    scores = jkv.score(
        attention_model,
        params,
        make_prompts(),
        continuations,
        config=CONFIG,
        exact=exact,
    )
    return scores.sum(), scores


score_both = jax.jit(jax.value_and_grad(score, has_aux=True), static_argnums=2)


@pytest.mark.newest_further
def test_exact_scores_equal_reported_logprobs_under_grad(known):
    (_, scores), _ = score_both(attention_params(), known.tokens, EXACT)
    np.testing.assert_array_equal(scores, known.logprobs)


@pytest.mark.further
def test_scores_without_exact_have_other_bits_and_the_same_gradient(known):
    (_, usual), expected = score_both(attention_params(), known.tokens, False)
    assert (usual != known.logprobs).any()
    _, gradient = score_both(attention_params(), known.tokens, EXACT)
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair), gradient, expected)
    alone = jax.jit(score, static_argnums=2)(attention_params(), known.tokens, EXACT)
    np.testing.assert_array_equal(alone[1], known.logprobs)


@pytest.mark.further  # the engine below covers windows
@pytest.mark.one_end
def test_windows_of_steps(known):
    prompts, params = make_prompts(), attention_params()
    sampling = Sampling(temperature=0.8, seeds=jnp.arange(6))
    cache = jkv.init(CONFIG)
    state = start(
        attention_model, params, cache, prompts, max_new_tokens=NEW, exact=EXACT
    )
    step = jax.jit(decode, static_argnames="model")
    while state.is_running.any():
        cache, state = step(
            attention_model, params, cache, state, sampling=sampling, num_steps=3
        )
    assert_same_bits(state.result, known)


@pytest.mark.further
def test_open_sequences(known):
    prompts, rows = make_prompts(), [4, 1, 2]
    cache, opened = jkv.allocate(jkv.init(CONFIG), [0] * 3)
    _, found = jax.jit(jkv.extend, static_argnames=SHAPES[:2] + ("exact",))(
        attention_model,
        attention_params(),
        cache,
        opened.seq_ids,
        prompts[rows],
        max_new_tokens=NEW,
        sampling=Sampling(temperature=0.8, seeds=jnp.asarray(rows)),
        exact=EXACT,
    )
    assert_same_bits(found, known, rows)


@pytest.mark.further
@pytest.mark.one_end
def test_an_engine_returns_the_same_bits(known):
    cache = jkv.init(CONFIG)
    engine = Engine(
        attention_model,
        attention_params(),
        cache,
        max_running=3,
        max_new_tokens=NEW,
        num_steps=2,
        exact=EXACT,
    )
    numbers = [
        engine.submit(prompt[prompt >= 0], sampling=Sampling(temperature=0.8, seeds=i))
        for i, prompt in enumerate(make_prompts())
    ]
    found = [engine.results(number)[0] for number in numbers]
    assert [each.tokens for each in found] == known.tokens.tolist()
    logprobs = np.array([each.logprobs for each in found], np.float32)
    np.testing.assert_array_equal(logprobs, known.logprobs)


def check(model):
    tried = dict(max_new_tokens=3, exact=EXACT, config=CONFIG)
    params, prompts = attention_params(), make_prompts()[:2]
    return jkv.check_exact(model, params, jkv.init(CONFIG), prompts, **tried)


@pytest.mark.further
def test_check_exact_accepts_the_attention_model():
    report = check(attention_model)
    assert report.raise_for_status() is report
    assert len(report.played) == 6


@pytest.mark.further
@pytest.mark.one_end
def test_check_exact_detects_a_batch_dependent_model():
    def heeds_others(params, tokens, cache, batch):
        scale = 1 + 1e-5 * jnp.sum(batch.valid, dtype=jnp.float32)
        layers = dict(params["layers"])
        layers["value"] = layers["value"].at[1].multiply(scale)
        return attention_model(params | {"layers": layers}, tokens, cache, batch)

    report = check(heeds_others)
    assert report.difference.layer == 1 and report.difference.array == "values"
    with pytest.raises(jkv.CacheError, match="layer 1"):
        report.raise_for_status()


WIDTH = 16
INPUTS = {"x": ((WIDTH,), "float32")}
STATE_WEIGHTS = np.random.default_rng(4).standard_normal(
    (VOCABULARY, WIDTH), np.float32
)


def make_state_config(**fields):
    states = jkv.StateConfig(
        num_layers=1,
        arrays={"sum": ((WIDTH, WIDTH), "float32")},
        max_sequences=14,
        max_context_length=40,
        block_size=4,
        num_snapshots=6,
        snapshot_every=8,
        **fields,
    )
    return jkv.GroupedConfig(groups=(states,), layer_groups=(0,), prefix_caching=True)


def state_model(weights, tokens, cache, batch):
    """A decaying sum, in two forms with different bits."""
    rows = jnp.take(weights, tokens, axis=0)

    def rule(state, given):
        x = given["x"]
        total = 0.9 * state["sum"] + x[:, None] * x[None]
        return {"sum": total}, jnp.tanh(total) @ x

    def chunk_rule(state, given, count):
        x, size = given["x"], given["x"].shape[0]
        powers = jnp.arange(size, dtype=jnp.float32)
        gaps = powers[:, None] - powers[None]
        decays = jnp.where(gaps >= 0, 0.9**gaps, 0)
        sums = jnp.einsum("ts,sa,sb->tab", decays, x, x)
        sums += (0.9 ** (powers + 1))[:, None, None] * state["sum"][None]
        last = sums[jnp.maximum(count - 1, 0)]
        total = jnp.where(count > 0, last, state["sum"])
        return {"sum": total}, jnp.einsum("tab,tb->ta", jnp.tanh(sums), x)

    outputs, cache = jkv.fold_state(
        cache, 0, batch, rule, {"x": rows}, chunk_rule=chunk_rule, chunk_size=8
    )
    hidden = (rows + outputs)[jnp.minimum(batch.last_rows, batch.num_rows - 1)]
    return jnp.sin(hidden) @ weights.T, cache


@pytest.mark.further
@pytest.mark.one_end
def test_recurrent_layers():
    """Prompts are split differently, found in the prefix cache, and scored."""
    config, prompts = make_state_config(), make_prompts()[:2]
    report = jkv.check_exact(
        state_model,
        STATE_WEIGHTS,
        jkv.init(config),
        prompts,
        max_new_tokens=3,
        exact=EXACT,
        config=config,
    )
    assert len(report.raise_for_status().played) == 6


@pytest.mark.further
@pytest.mark.one_end
def test_scoring_stores_no_pending_tokens():
    """Neither inputs nor the axes that shard them are needed for scoring."""
    spread = dict(inputs=INPUTS, max_pending=2, heads_axes={"sum": 1, "x": 0})
    continuations = make_prompts()[:2], jnp.array([[3, 1], [4, 1]])
    plain, found = (
        jkv.score(
            state_model, STATE_WEIGHTS, *continuations, config=config, exact=EXACT
        )
        for config in (make_state_config(), make_state_config(**spread))
    )
    np.testing.assert_array_equal(found, plain)


@pytest.mark.one_end
def test_exact_refuses_options_that_change_step_shapes():
    call = dict(max_new_tokens=2, exact=EXACT)
    model = attention_model, attention_params()
    for options, message in (
        ({"row_counts": (8,)}, "omit row_counts"),
        ({"chunk_size": 16}, "omit row_counts"),
        ({"max_running": 7}, "max_running must be at most 6"),
        ({"exact": (8, 4)}, "a row for each"),
        ({"exact": 8}, r"\(W, R\)"),
        ({"speculate": PromptLookup(num_tokens=2)}, "omit speculate"),
    ):
        with pytest.raises(ValueError, match=message):
            jkv.generate(*model, jkv.init(CONFIG), [[1, 2]], **(call | options))
    with pytest.raises(ValueError, match="must be at most 6"):
        jkv.extend(*model, jkv.init(CONFIG), [0] * 7, [[1]] * 7, **call)
    draft_tokens = make_state_config(max_pending=2, inputs=INPUTS)
    with pytest.raises(ValueError, match="omit max_pending"):
        jkv.generate(*model, jkv.init(draft_tokens), [[1, 2]], **call)
