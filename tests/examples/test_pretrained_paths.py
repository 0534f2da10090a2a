"""Grouped layers, warm prefixes, chunked prompts and batching in one program.

The greedy tokens equal those of `transformers` for each prompt alone.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from support.checkpoints import checkpoint_fixtures as fixtures
from support.jax_versions import with_further

import jkv

pytestmark = pytest.mark.one_end
STATIC = ("model", "max_new_tokens", "max_running", "row_counts")
generate = jax.jit(jkv.generate, static_argnames=STATIC, donate_argnames="cache")
CASES = ("gemma4", "gemma4_moe", "cohere2", "mistral4", "olmo3", "ministral3")


@pytest.mark.parametrize("name", with_further(CASES, *CASES[:-1]))
def test_greedy_tokens_equal_transformers(name):
    model, params = pretrained.load(fixtures.FIXTURES / name)
    expected = np.load(fixtures.FIXTURES / name / "expected.npz")
    ends = expected["prompt_lengths"].cumsum()
    prompts = np.split(expected["prompts"], ends[:-1])
    # Two run at a time and the third waits; a step has sixteen rows, a prompt more.
    config = model.cache_config(
        96,
        max_sequences=2,
        step_tokens=16,
        block_size=4,
        prefix_caching=True,
        dtype=jnp.float32,
    )
    # Enough blocks for the cached prefixes.
    roomy = (
        dataclasses.replace(group, num_blocks=3 * group.num_blocks)
        for group in config.groups
    )
    cache = jkv.init(dataclasses.replace(config, groups=tuple(roomy)))
    for is_warm in (False, True):
        cache, result = generate(
            model,
            params,
            cache,
            prompts,
            max_new_tokens=fixtures.NUM_STEPS + 1,
            row_counts=(16,),
        )
        np.testing.assert_array_equal(result.tokens, expected["generated"])
        assert (int(result.statistics.cached_tokens) > 0) == is_warm
        jkv.check(cache)


@pytest.mark.further
def test_gemma_4_shares_keys_through_jkv_step(monkeypatch):
    """`jkv.Step` replaces the model's attention, as in another library's model.

    Its last two layers have no keys and values, and attend to those of earlier ones.
    """
    model, params = pretrained.load(fixtures.FIXTURES / "gemma4")
    expected = np.load(fixtures.FIXTURES / "gemma4" / "expected.npz")
    ends = expected["prompt_lengths"].cumsum()
    prompts = np.split(expected["prompts"], ends[:-1])
    shared = []  # for each attention call, True without own keys

    def forward(params, tokens, _positions, step):
        written = []

        def write(cache, _layer, _batch, *rows):
            written[:] = [each[None] for each in rows]
            return cache

        def attend(_cache, layer, _batch, queries, **options):
            keys, values = written or (None, None)
            written.clear()
            shared.append(keys is None)
            heads = step.attend(queries[None], keys, values, layer=layer, **options)
            return heads[0]

        names = dict(write=write, attend=attend, observe=lambda cache, *_: cache)
        hook = types.SimpleNamespace(**names)
        with monkeypatch.context() as patch, step.traced():
            patch.setattr(pretrained.attention, "jkv", hook)
            return model(params, tokens[0], step.cache, step.batch, all_rows=True)[0]

    sizes = dict(max_sequences=3, step_tokens=16, block_size=4, dtype=jnp.float32)
    cache, result = generate(
        jkv.model_of(forward),
        params,
        jkv.init(model.cache_config(96, **sizes)),
        prompts,
        max_new_tokens=fixtures.NUM_STEPS + 1,
        row_counts=(16,),
    )
    np.testing.assert_array_equal(result.tokens, expected["generated"])
    assert shared[:4] == [False, False, True, True]
    jkv.check(cache)
