"""Equal layers in one loop that reads weights without copies."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from pretrained import layers
from support.checkpoints import checkpoint_fixtures as fixtures

import jkv

pytestmark = pytest.mark.one_end

# Grouped windows with two RoPE kinds; biases and windows in one pool; latent vectors
# and experts computed one by one.
NAMES = ("gemma3", "qwen2", "deepseek_v3")
PROMPTS = np.arange(12, dtype=np.int32) % 7 + 3  # five and seven tokens


@functools.cache
def load(name, **options):
    return pretrained.load(fixtures.checkpoint_folder(name), jnp.float32, **options)


def run(model, params):
    """Return the logits of two prompts, and of one more token of each."""
    sizes = dict(max_sequences=2, num_blocks=8, block_size=16, dtype=jnp.float32)
    config = model.cache_config(32, **sizes, step_tokens=12)
    cache, opened = jkv.allocate(jkv.init(config), [0, 0])
    cache, batch = jkv.append(cache, opened.seq_ids, [5, 7], capacity=12)
    prompts, cache = model(params, PROMPTS, cache, batch, all_rows=True)
    cache, batch = jkv.append(jkv.commit(cache, batch), opened.seq_ids)
    return prompts, model(params, jnp.array([4, 5]), cache, batch)[0]


@pytest.fixture
def no_copies(monkeypatch):
    """Treat the tiny matrices as too large to copy."""
    monkeypatch.setattr(layers, "MOST_COPIED", 64)


@pytest.mark.further
@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("name", NAMES)
def test_looped_layers_equal_separate_layers(name):
    (model, params), (looped, joined) = load(name), load(name, loop_layers=True)
    expected = jax.jit(functools.partial(run, model))(params)
    found = jax.jit(functools.partial(run, looped))(joined)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


def count_switches(jaxpr, num_branches):
    """Count conditionals with `num_branches` branches in a program."""
    found = 0
    for equation in jaxpr.eqns:
        branches = equation.params.get("branches", ())
        found += len(branches) == num_branches
        for inner in jax.tree.leaves(
            equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            if hasattr(inner, "eqns"):
                found += count_switches(inner, num_branches)
    return found


@pytest.mark.usefixtures("no_copies")
def test_each_matrix_is_a_conditional_over_layers():
    """One loop body selects among all layers."""
    model, params = load("llama3", loop_layers=True)
    matrices = {name for name, each in params["layers"][0].items() if each.size > 64}
    assert matrices == {"query_key_value", "output", "gate_up", "down"}
    plain = pretrained.Decoder(dataclasses.replace(model.config, loop_layers=False))

    def count(model):
        trace = jax.make_jaxpr(functools.partial(run, model))(params)
        return count_switches(trace.jaxpr, model.config.num_layers)

    # Two steps, prefill and decode.
    assert count(model) - count(plain) == 2 * len(matrices)


@pytest.mark.parametrize("name", ["qwen2", "phi3", "gemma4"])
def test_joined_matrices_are_concatenated(name):
    """Including biases, and as stored in files; not if heads differ by layer."""
    (_, plain), (_, joined) = load(name), load(name, loop_layers=True)
    for one, both in zip(plain["layers"], joined["layers"], strict=True):
        assert ("gate_up" in both) == (name != "gemma4")
        found = dict(both)
        for parts, kind in itertools.product(layers.JOINED, ("", "_bias")):
            if (rows := found.pop("_".join(parts) + kind, None)) is not None:
                names = [f"{part}{kind}" for part in parts]
                ends = np.cumsum([one[each].shape[1] for each in names])
                found |= zip(names, np.split(rows, ends[:-1], axis=1), strict=True)
        jax.tree.map(np.testing.assert_array_equal, found, dict(one))


@pytest.mark.parametrize("rows", [1, 2, 32, 33])
def test_small_batches_have_the_matrix_on_the_left(rows):
    """XLA's CPU runtime then does not transpose it."""
    rng = np.random.default_rng(rows)
    x, matrix = (rng.standard_normal((n, 24), np.float32) for n in (rows, 40))
    compiled = jax.jit(layers.multiply).lower(x, matrix).compile()
    np.testing.assert_allclose(compiled(x, matrix), x @ matrix.T, rtol=1e-5, atol=1e-5)
    (product,) = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", compiled.as_text())
    assert product == (f"40,{rows}" if 1 < rows <= 32 else f"{rows},40")
