"""Log-probabilities of completions and their gradients, compared with a dense model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import windowed_model
from support.models.small_attention_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    attention_model,
    attention_params,
    dense_rows,
)

import jkv

CONFIG = jkv.CacheConfig(
    num_layers=LAYERS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    block_size=4,
    num_blocks=1,
    max_sequences=1,
    max_context_length=1,
)
# Prompts with a partial block, full blocks, under a block, empty; completions that end
# early, or at once.
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7, 9], [2], []]
CONTINUATIONS = [
    *([1, 8, 2, 8, 1, 8], [2, 8, 4], [5]),
    *([9, 0, 4, 5], [], [2, 3, 5, 3, 6, 0]),
    *([7, 1], [3, 5, 2, 6, 6, 2], [4, 9, 7]),
    *([4, 5], [], [1, 3, 2, 2, 5, 0]),
]
LENGTHS = [len(each) for each in CONTINUATIONS]
ROWS = 4 * 8 + 12 * 5


def make_score(model=attention_model, config=CONFIG):
    return functools.partial(jkv.score, model, config=config)


def dense_scores(params, prompts=PROMPTS, continuations=CONTINUATIONS, xp=np):
    """Score each sequence alone: the log-probabilities of its completion."""
    each, found = len(continuations) // len(prompts), []
    pairs = [(prompts[i // each], tokens) for i, tokens in enumerate(continuations)]
    # At least one padding token after the end, which is causally masked.
    sequences = np.zeros(
        (len(pairs), 1 + max(len(p) + len(c) for p, c in pairs)), np.int32
    )
    for row, (prompt, continuation) in zip(sequences, pairs, strict=True):
        row[: len(prompt) + len(continuation)] = [*prompt, *continuation]
    run = functools.partial(dense_rows, params, xp=xp)
    rows = (
        jax.vmap(run)(sequences) if xp is jnp else [run(tokens) for tokens in sequences]
    )
    for logits, (prompt, continuation) in zip(rows, pairs, strict=True):
        logits = logits - logits.max(axis=-1, keepdims=True)
        normalised = logits - xp.log(xp.exp(logits).sum(axis=-1, keepdims=True))
        # The first token after an empty prompt has no score.
        known = continuation if prompt else continuation[1:]
        first = max(1, len(prompt)) - 1
        table = first + np.arange(len(known), dtype=np.int32)
        found.append(normalised[table, np.array(known, np.int32)])
    return found


def weigh(scores):
    """Return a loss that weighs each token differently, as advantages do."""
    weights = [np.cos(i + np.arange(len(each))) for i, each in enumerate(scores)]
    return sum((w * each).sum() for w, each in zip(weights, scores, strict=True))


@pytest.mark.one_end
def test_scores_and_gradients_equal_a_dense_model():
    """Gradients of all weights, including those behind a prompt's shared keys."""
    params = attention_params()

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        scores = make_score()(params, PROMPTS, CONTINUATIONS)
        known = [scores[i, i >= 9 : max(1, length)] for i, length in enumerate(LENGTHS)]
        return weigh(known), (scores, known)

    (_, (scores, known)), gradient = jax.jit(loss)(params)
    expected = dense_scores(jax.device_get(params))
    for found, other in zip(known, expected, strict=True):
        np.testing.assert_allclose(found[: len(other)], other, atol=2e-5)
    is_token = np.arange(6) < np.array(LENGTHS)[:, None]
    assert not np.asarray(scores)[~is_token].any()
    assert not np.asarray(scores)[[9, 11], 0].any()  # after empty prompts
    expected = jax.jit(jax.grad(lambda p: weigh(dense_scores(p, xp=jnp))))(params)
    for one, other in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        assert np.abs(other).max() > 1e-2
        np.testing.assert_allclose(one, other, atol=2e-4)


@pytest.mark.one_end
def test_windows_of_grouped_layers_equal_numpy():
    """Tokens that a window would release are kept for the rows of the prompt."""
    full = jkv.CacheConfig(num_blocks=12, max_sequences=1, **windowed_model.SIZES)
    windowed = dataclasses.replace(full, sliding_window=windowed_model.WINDOW)
    config = jkv.GroupedConfig(
        groups=(full, windowed),
        layer_groups=(1, 0),
        prefix_caching=True,
    )
    prompts, continuations = (
        windowed_model.PROMPTS[:2],
        [[7, 0, 3], [4, 4], [2], [9, 28, 1]],
    )
    score = jax.jit(make_score(windowed_model.mixed_model, config))
    found = score(windowed_model.EMBEDDING, prompts, continuations)
    for i, (continuation, scores) in enumerate(zip(continuations, found, strict=True)):
        for place, token in enumerate(continuation):
            before = prompts[i // 2] + continuation[:place]
            logits = windowed_model.find_logits(before, windowed_model.MIXED)
            expected = logits[token] - np.log(np.exp(logits).sum())
            np.testing.assert_allclose(scores[place], expected, rtol=1e-4, atol=1e-4)


def traced_rows(prompts, continuations, model=attention_model, config=CONFIG):
    """Return the row counts of the model's calls, and the scores' shape, by tracing."""
    rows = []

    def watched(params, tokens, cache, batch):
        rows.append(tokens.shape[0])
        return model(params, tokens, cache, batch)

    score = make_score(watched, config)
    scores = jax.eval_shape(
        lambda p: score(p, prompts, continuations), attention_params()
    )
    return rows, scores.shape


def test_a_prompt_is_computed_once_for_all_continuations():
    assert traced_rows(PROMPTS, CONTINUATIONS) == ([ROWS], (12, 6))
    assert traced_rows(PROMPTS, [[token] for token in range(8)]) == ([32], (8, 1))


@pytest.mark.one_end
def test_only_scored_rows_compute_logits():
    """Only the last rows of prompts are projected to logits."""
    jaxpr = jax.make_jaxpr(lambda p: make_score()(p, PROMPTS, CONTINUATIONS))(
        attention_params()
    )
    shapes = {v.aval.shape for e in jaxpr.eqns for v in e.outvars}
    assert (4 + 12 * 5, VOCABULARY) in shapes
    assert (ROWS, VOCABULARY) not in shapes


@pytest.mark.one_end
class TestMistakes:
    def test_an_uneven_number_of_continuations(self):
        with pytest.raises(ValueError, match="a multiple of 4 rows, .* got 5"):
            make_score()(None, PROMPTS, CONTINUATIONS[:5])

    def test_no_continuation(self):
        with pytest.raises(ValueError, match="a multiple of 4 rows, .* got 0"):
            make_score()(None, PROMPTS, [])

    def test_missing_continuations(self):
        with pytest.raises(ValueError, match=r"continuations must be i32\[B, P\]"):
            make_score()(None, PROMPTS, CONTINUATIONS[0])

    def test_an_invalid_layer(self):
        def model(_, __, cache, batch):
            rows = jnp.zeros((ROWS, KV_HEADS, DIM))
            return rows, jkv.write(cache, LAYERS, batch, rows, rows)

        with pytest.raises(ValueError, match=r"layer must be in 0\.\.1, got 2"):
            traced_rows(PROMPTS, CONTINUATIONS, model)

    def test_keys_of_another_shape(self):
        def model(_, __, cache, batch):
            rows = jnp.zeros((ROWS, HEADS, DIM))
            return rows, jkv.write(cache, 0, batch, rows, rows)

        with pytest.raises(ValueError, match=r"keys must be \[R, K, D\]"):
            traced_rows(PROMPTS, CONTINUATIONS, model)

    def test_a_verb_that_changes_sequences(self):
        def model(_, __, cache, batch):
            cache = jkv.commit(cache, batch)
            return jnp.zeros((ROWS, VOCABULARY)), cache

        with pytest.raises(ValueError, match="commit is not supported in score"):
            traced_rows(PROMPTS, CONTINUATIONS, model)


@pytest.mark.one_end
def test_tokens_outside_the_vocabulary_are_refused_outside_jit():
    def flat(_params, _tokens, cache, batch):
        return jnp.zeros((batch.last_rows.shape[0], 10), jnp.float32), cache

    score = functools.partial(make_score(flat), None)
    for prompt, continuation, message in [
        ([1, 2, 3], [3, 4, 10], "continuation 0 has 10 at position 2"),
        ([1, 11, 3], [3, 4, 5], "prompt 0 has 11 at position 1"),
    ]:
        with pytest.raises(ValueError, match=f"{message}.*from 0 to 9"):
            score([prompt], [continuation])
    # Tokens past an end are ignored; inside jit an invalid token gives NaN.
    behind = np.array([[1, -1, 99], [9, -100, 99]], np.int32)
    assert np.isfinite(score(behind[:1], behind[1:])).all()
    continuations = np.array([[1, 2, 3], [3, 10, 4]], np.int32)
    scores = np.asarray(jax.jit(score)(continuations[:1], continuations[1:]))
    assert np.isnan(scores).tolist() == [[False, True, False]]


@pytest.mark.one_end
def test_higher_derivatives_raise():
    """They raise, as documented, instead of returning wrong numbers."""

    @jax.jit
    def loss(params):
        return make_score()(params, [[1, 2, 3]], [[3, 4, 5]]).sum()

    def slope(params):
        return sum(array.sum() for array in jax.tree.leaves(jax.grad(loss)(params)))

    params = attention_params()
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(loss, (params,), (params,))
    with pytest.raises(ValueError, match="Reverse-mode differentiation"):
        jax.eval_shape(jax.grad(slope), params)
