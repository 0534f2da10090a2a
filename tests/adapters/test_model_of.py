"""model_of: another library's model in every loop, compared with the verbs."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import dealt
from support.models.small_attention_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    attention_model,
    attention_params,
    dense_rows,
)
from support.tolerances import assert_close

import jkv

CONFIG = jkv.CacheConfig(
    num_layers=LAYERS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    num_blocks=24,
    block_size=4,
    max_sequences=8,
    max_context_length=24,
    dtype="float32",
)
PROMPTS = [[5, 9, 5, 9, 5, 9, 5], [11, 7, 3]]


def run_layers(params, tokens, positions, step):
    """Run the small attention model with a hook for its attention."""
    hidden = params["embedding"][tokens] + params["positions"][positions]
    for layer in range(LAYERS):
        weights = {name: each[layer] for name, each in params["layers"].items()}
        queries, keys, values = (
            (hidden @ weights[name]).reshape(*tokens.shape, heads, DIM)
            for name, heads in (
                ("query", HEADS),
                ("key", KV_HEADS),
                ("value", KV_HEADS),
            )
        )
        heads = step.attend(queries, keys, values)
        hidden = jnp.tanh(hidden + heads.reshape(hidden.shape))
    return hidden


def forward(params, tokens, positions, step):
    hidden = run_layers(params, tokens, positions, step)
    return step.last(hidden) @ params["head"]


def forward_all(params, tokens, positions, step):
    """Return the logits of all rows."""
    return run_layers(params, tokens, positions, step) @ params["head"]


def take_step(model, params, all_rows=False):
    """Return logits of a prompt beside decode steps of a longer one, and the cache."""
    cache, opened = jkv.allocate(jkv.init(CONFIG), [0, 0])
    rows = jnp.arange(8, dtype=jnp.int32) % 7
    for counts in ([5, 0], [1, 3]):
        counts = jnp.asarray(counts, jnp.int32)
        cache, batch = jkv.append(cache, opened.seq_ids, counts, capacity=8)
        logits, cache = model(params, rows, cache, batch, all_rows=all_rows)
    return jnp.where(batch.valid[:, None], logits, 0) if all_rows else logits, cache


@functools.partial(jax.jit, static_argnames=("model", "all_rows"))
def take_step_and_derive(model, params, all_rows=False):
    def loss(params):
        logits, cache = take_step(model, params, all_rows)
        return jnp.sum(jnp.sin(logits)), (logits, cache.storage)

    return jax.value_and_grad(loss, has_aux=True)(params)


WAYS = [
    (forward, "sequence", False),
    (forward, "packed", True),
    (forward_all, "batch", False),
    (forward_all, "sequence", True),
]


@pytest.mark.newest_further
@pytest.mark.parametrize("function, rows, all_rows", dealt(WAYS))
def test_a_step_equals_a_model_that_calls_the_verbs(function, rows, all_rows):
    """Logits, cache and gradients, in each layout."""
    model, params = jkv.model_of(function, rows=rows), attention_params()
    ours = take_step_and_derive(model, params, all_rows=all_rows)
    theirs = take_step_and_derive(attention_model, params, all_rows=all_rows)
    for here, there in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        assert_close(here, there)
    assert np.ptp(ours[0][1][0]) > 1


def continue_densely(prompt, num_tokens):
    params = jax.tree.map(np.asarray, attention_params())
    tokens = [*prompt]
    for _ in range(num_tokens):
        tokens.append(int(dense_rows(params, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.further
@pytest.mark.one_end
def test_generation_and_speculation():
    """Draft tokens are verified by every row's logits, although `last` is called."""
    lookup = jkv.PromptLookup(num_tokens=2, min_ngram=1, cost=1.0)
    found = jax.jit(
        lambda params, cache: jkv.generate(
            jkv.model_of(forward),
            params,
            cache,
            PROMPTS,
            max_new_tokens=12,
            row_counts=(8,),
            speculate=lookup,
        )[1]
    )(attention_params(), jkv.init(CONFIG))
    wanted = [continue_densely(prompt, 12) for prompt in PROMPTS]
    assert found.tokens.tolist() == wanted
    assert found.statistics.accepted_tokens > 0


@pytest.mark.one_end
def test_models_of_one_function_are_equal_and_forward_options():
    def with_hidden(params, tokens, positions, step, *, aux_layers=()):
        hidden = run_layers(params, tokens, positions, step)
        return step.last(hidden) @ params["head"], hidden[0, :, : len(aux_layers)]

    model = jkv.model_of(with_hidden)
    assert model == jkv.model_of(with_hidden) and hash(model) is not None
    assert model != jkv.model_of(with_hidden, rows="batch")
    assert [*inspect.signature(model).parameters][4:] == ["all_rows", "aux_layers"]
    assert "aux_layers" not in inspect.signature(jkv.model_of(forward)).parameters
    cache, opened = jkv.allocate(jkv.init(CONFIG), [0])
    cache, batch = jkv.append(cache, opened.seq_ids, 3, capacity=4)
    tokens = jnp.arange(4, dtype=jnp.int32)
    run = functools.partial(model, attention_params(), tokens, cache, batch)
    logits, after, hidden = jax.eval_shape(lambda: run(aux_layers=(0, 1)))
    assert logits.shape == (1, 19) and hidden.shape == (4, 2)
    assert after.sizes == cache.sizes
    assert jax.eval_shape(lambda: run(all_rows=True)[0]).shape == (4, 19)


@pytest.mark.one_end
def test_invalid_arguments_are_refused_by_name():
    with pytest.raises(jkv.UsageError, match="rows must be one of 'sequence'"):
        jkv.model_of(forward, rows="rows")
    with pytest.raises(jkv.UsageError, match="forward must be callable as"):
        jkv.model_of(attention_params())
    idle = jkv.model_of(lambda params, *_: params["embedding"])
    with pytest.raises(jkv.UsageError, match=r"must call step\.attend in each layer"):
        take_step(idle, attention_params())
