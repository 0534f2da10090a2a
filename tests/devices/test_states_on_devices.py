"""States on several devices: spread like heads over one axis, in pools over another."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from support.folding_model import MODELS, continue_text, make_config

import jkv

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
KIND = "keys+state"
PROMPTS = [[1, 2, 3, 4, 0, 1, 2, 2, 3], [2, 1], [1, 2, 3, 4, 0, 1, 2, 2, 4], [3] * 9]

pytestmark = pytest.mark.one_end


def test_states_are_spread_where_the_configuration_says():
    cache = jkv.init(make_config(KIND), mesh=MESH, heads="tp")
    spread = PartitionSpec(None, None, "tp")
    assert cache.states[0].rows["fold"].sharding.spec == spread
    assert cache.states[0].bases.sharding.spec == PartitionSpec()
    specs = jkv.partition_specs(cache)
    assert specs.states[0].snapshot_rows["fold"] == spread
    assert specs.states[0].bases == PartitionSpec()


@pytest.mark.further
def test_a_queue_over_pools_of_states(tmp_path):
    """Each rank has sequences and snapshots of its own; a file has all of them."""
    where = dict(mesh=MESH, heads="tp", pools="dp")
    cache = jkv.init(make_config(KIND), **where)
    run = jax.jit(
        functools.partial(jkv.generate, MODELS[KIND]),
        static_argnames=("max_new_tokens", "max_running"),
    )
    for _ in range(2):  # cold and warm
        cache, result = run(None, cache, PROMPTS, max_new_tokens=5, max_running=2)
        wanted = [continue_text(prompt, 5, KIND) for prompt in PROMPTS]
        np.testing.assert_array_equal(result.tokens, wanted)
    assert int(result.statistics.cached_tokens) > 0
    jkv.save(tmp_path / "pools", cache)
    loaded = jkv.load(tmp_path / "pools", **where)
    kept = loaded.states[0].rows["fold"].sharding.spec
    assert kept == PartitionSpec("dp", None, None, "tp")
    cache, result = run(None, loaded, PROMPTS, max_new_tokens=5, max_running=2)
    np.testing.assert_array_equal(result.tokens, wanted)
