"""A checkpoint whose weights are sharded while they are read."""

import functools

import jax
import numpy as np
import pretrained
import pytest
from generating.options import BUNDLED
from support.compiled_hlo import ALL_PASSES
from support.models.sharded_model import collectives

import jkv

TOKENS = np.arange(100, 108, dtype=np.int32)


def run(model, params, cache):
    """Return the logits of a prompt."""
    cache, batch = jkv.append(jkv.allocate(cache, 0)[0], [0], 8, capacity=8)
    return model(params, TOKENS, cache, batch)[0]


@pytest.mark.one_end
def test_a_model_on_six_devices_has_the_logits_of_one():
    """Two kv heads, each held by three devices; no device has a whole matrix.

    After its second sharded matrix a layer sums over the devices; here only attention
    does.
    """
    mesh = pretrained.make_mesh(6)
    model, params = pretrained.load(BUNDLED, mesh=mesh)
    for name in ("query", "output"):  # 512 hidden units are not divisible by 6
        array = params["layers"][0][name]
        assert array.addressable_shards[0].data.nbytes * 6 == array.nbytes
    for name in ("key", "gate"):
        assert params["layers"][0][name].sharding.is_fully_replicated
    config = jkv.CacheConfig(
        **model.cache_fields,
        num_blocks=4,
        max_sequences=1,
        max_context_length=16,
        dtype="float32",
    )
    cache = jkv.init(config, mesh=mesh, heads="tp")
    step = jax.jit(functools.partial(run, model))
    compiled = step.lower(params, cache).compile(ALL_PASSES)
    # Products of few rows have the matrix on the left, and rows as columns.
    sums = {("all-reduce", "f32[192,8]"): model.config.num_layers}
    assert collectives(compiled) == sums
    wanted = step(pretrained.load(BUNDLED)[1], jkv.init(config))
    np.testing.assert_allclose(compiled(params, cache), wanted, atol=2e-4)


@pytest.mark.one_end
def test_invalid_numbers_of_devices_are_refused():
    with pytest.raises(ValueError, match="there are 8 devices"):
        pretrained.make_mesh(9)
    with pytest.raises(ValueError, match="6 query heads .* 4 devices"):
        pretrained.load(BUNDLED, mesh=pretrained.make_mesh(4))
