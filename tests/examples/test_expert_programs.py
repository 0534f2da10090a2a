"""Programs on GLM, Hunyuan, ERNIE and others: tokens equal transformers'.

In a queue, two at a time, in chunks of four tokens, with cold and warm prefixes; on a
plain cache, or with a pool per window.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from support.checkpoints import checkpoint_fixtures as fixtures

import jkv

pytestmark = [pytest.mark.one_end, pytest.mark.further]

# The first has a window in one of two layers, the second in all, the others none.
NAMES = ["qwen2_moe", "phimoe", "glm", "glm4", "glm4_moe", "glm4_moe_lite"]
NAMES += ["hunyuan_dense", "hunyuan_moe", "ernie4_5", "ernie4_5_moe", "minimax_m2"]

generate = jax.jit(
    jkv.generate,
    static_argnames=("model", "max_new_tokens", "chunk_size", "max_running"),
    donate_argnames="cache",
)


def make_config(model):
    """Return a cache for three sequences with prefix caching, grouped by windows."""
    sizes = dict(block_size=4, dtype=jnp.float32, prefix_caching=True)
    fields, windows = {**model.cache_fields}, model.config.windows
    if not any(windows):
        return jkv.CacheConfig(
            **fields, **sizes, num_blocks=72, max_sequences=3, max_context_length=96
        )
    del fields["num_layers"]
    return jkv.GroupedConfig.for_context_length(
        96, max_sequences=4, layer_windows=windows, step_tokens=16, **fields, **sizes
    )


@pytest.mark.parametrize("name", NAMES)
def test_prompts_cold_and_warm_in_a_queue(name):
    folder = fixtures.checkpoint_folder(name)
    model, params = pretrained.load(folder, scan_layers=True)
    expected = dict(np.load(folder / "expected.npz"))
    ends = expected["prompt_lengths"].cumsum()
    prompts = np.split(expected["prompts"], ends[:-1])
    cache, cached = jkv.init(make_config(model)), []
    for _ in range(2):
        cache, found = generate(
            model,
            params,
            cache,
            prompts,
            max_new_tokens=fixtures.NUM_STEPS + 1,
            chunk_size=4,
            max_running=2,
        )
        np.testing.assert_array_equal(found.tokens, expected["generated"])
        cached.append(int(found.statistics.cached_tokens))
        jkv.check(cache)
    assert cached[0] == 0 < cached[1]
