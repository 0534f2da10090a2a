"""Kv heads spread over eight devices: values, places, collectives, traces."""

import collections
import functools
import math

import chex
import jax
import numpy as np
import pytest
from compiled_modules import OPERATION, pool_sized_operations
from jax.sharding import AxisType
from sharded_model import (
    AUTO,
    LATENT,
    NUM_LAYERS,
    NUM_ROWS,
    REPEATED,
    TWO_AXES,
    WIDTH,
    assert_near,
    collectives,
    make_weights,
    place_weights,
    play,
    play_alone,
    take_step,
)

import jkv

LAYOUTS = {
    "float32": AUTO,
    "repeated int8": REPEATED,
    "latent, Explicit": LATENT,
    "bfloat16 on two axes, Explicit": TWO_AXES,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_donated_step_equals_one_device(name):
    """Its values, in place on each device, with no collective but the model's own."""
    layout = LAYOUTS[name]
    traced_once = chex.assert_max_traces(take_step, n=1)
    step = jax.jit(traced_once, donate_argnums=0)
    cache, weights = layout.init(), place_weights(layout)
    sharding = cache.keys.sharding
    rows = np.zeros(3, np.int32), np.zeros(3, np.int32), np.zeros(NUM_ROWS, np.int32)
    compiled = step.lower(cache, weights, *rows).compile()
    cache, logits = play(cache, weights, compiled)
    reference, wanted = play_alone(layout.config)
    assert_near(logits, wanted, layout.dtype)
    assert np.abs(wanted[0] - wanted[1]).max() > 0.1  # steps do differ

    jkv.check(cache)
    assert jkv.stats(cache) == jkv.stats(reference)
    assert cache.num_kv_heads == reference.num_kv_heads
    for layer in range(NUM_LAYERS):
        found, found_values, length = jax.device_get(jkv.read(cache, layer, 0))
        keys, values, _ = jax.device_get(jkv.read(reference, layer, 0))
        assert length == 7
        assert_near(found[:length], keys[:length], layout.dtype)
        assert_near(found_values[:length], values[:length], layout.dtype)

    # Each device has its share, and the metadata whole.
    num_shares = layout.mesh.shape["tp"]
    assert cache.keys.sharding.is_equivalent_to(sharding, cache.keys.ndim)
    for pool in cache.storage.values():
        for shard in pool.addressable_shards:
            assert shard.data.nbytes * num_shares == pool.nbytes
    for leaf in jax.tree.leaves(cache.metadata):
        assert leaf.sharding.is_fully_replicated

    # In the body of the loop over the layers, and nowhere else.
    assert collectives(compiled) == {("all-reduce", f"f32[{NUM_ROWS},{WIDTH}]"): 1}
    pools = cache.storage.values()
    layer_size = min(math.prod(pool.shape[1:]) for pool in pools) // num_shares
    assert pool_sized_operations(compiled, layer_size) == []
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert sum(pool.nbytes for pool in pools) // num_shares <= aliased
    assert aliased < jkv.memory_profile(cache).total_bytes


@pytest.mark.one_end
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_mesh_of_one_device_compiles_what_no_mesh_compiles(axis_type):
    """The same operations on the same shapes, each as often."""
    layout = AUTO._replace(axes=(("tp", 1),), axis_type=axis_type)
    assert operations(layout.init(), place_weights(layout)) == operations_alone()


def operations(cache, weights):
    rows = np.zeros(3, np.int32), np.zeros(3, np.int32), np.zeros(NUM_ROWS, np.int32)
    step = jax.jit(take_step, donate_argnums=0)
    lines = step.lower(cache, weights, *rows).compile().as_text().splitlines()
    return collections.Counter(
        found.groups() for line in lines if (found := OPERATION.search(line))
    )


@functools.cache
def operations_alone():
    weights = make_weights(AUTO.config.num_kv_heads, AUTO.config.value_head_dim)
    return operations(jkv.init(AUTO.config), jax.device_put(weights))
