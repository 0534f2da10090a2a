"""Whole generations on a mesh, inside one jit."""

import jax
import numpy as np
from ends import IS_NEWEST
from jax.sharding import AxisType
from sharded_model import (
    AUTO,
    WIDTH,
    collectives,
    make_weights,
    place_weights,
    run_model,
)

import jkv

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8, 9, 7, 9]]
# The oldest JAX plays the one kind of mesh, the newest the other.
LAYOUT = AUTO._replace(axis_type=AxisType.Explicit if IS_NEWEST else AxisType.Auto)
NUM_ROWS = 5


def generate(cache, weights):
    """Two samples of each prompt, three running at one time."""
    return jkv.generate(
        run_model,
        weights,
        cache,
        PROMPTS,
        max_new_tokens=5,
        num_samples=2,
        max_running=3,
        row_counts=(NUM_ROWS,),
        sampling=jkv.Sampling(
            temperature=np.float32(3), seeds=np.arange(6, dtype=np.int32)
        ),
    )


def test_generate_on_a_mesh_equals_one_device():
    """The same tokens, and each layer's collective is the only one in the loop."""
    arguments = LAYOUT.init(), place_weights(LAYOUT)
    compiled = jax.jit(generate, donate_argnums=0).lower(*arguments).compile()
    cache, result = compiled(*arguments)
    assert collectives(compiled) == {("all-reduce", f"f32[{NUM_ROWS},{WIDTH}]"): 1}
    jkv.check(cache)
    assert int(jkv.num_free_blocks(cache)) == cache.num_blocks
    weights = make_weights(LAYOUT.config.num_kv_heads, LAYOUT.config.value_head_dim)
    _, wanted = jax.jit(generate)(jkv.init(LAYOUT.config), jax.device_put(weights))
    np.testing.assert_array_equal(result.tokens, wanted.tokens)
    np.testing.assert_allclose(result.logprobs, wanted.logprobs, atol=1e-4)
    assert np.unique(np.asarray(result.tokens)).size > 4
