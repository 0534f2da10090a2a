"""Layers in groups, warm prefixes, chunked prompts and a queue, all in one program.

The greedy tokens equal those of `transformers` for each prompt alone, with its own
cache.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from support import checkpoint_fixtures as fixtures
from support.jax_versions import with_further

import jkv

pytestmark = pytest.mark.one_end
STATIC = ("model", "max_new_tokens", "max_running", "row_counts")
generate = jax.jit(jkv.generate, static_argnames=STATIC, donate_argnames="cache")
CASES = ("gemma4", "gemma4_moe", "cohere2", "mistral4", "olmo3", "ministral3")


@pytest.mark.parametrize("name", with_further(CASES, *CASES[1:]))
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
    # With room for the cached blocks of earlier texts.
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
