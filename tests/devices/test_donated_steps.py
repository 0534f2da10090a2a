"""A donated step on a mesh: values, placement, collectives and traces.

Heads are sharded, or the tokens of each block, or both.
"""

import collections
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support.compiled_hlo import OPERATION, pool_sized_operations
from support.jax_versions import dealt
from support.models.sharded_model import (
    AUTO,
    NUM_HEADS,
    NUM_LAYERS,
    NUM_ROWS,
    REPEATED,
    TOKENS,
    TWO_AXES,
    WIDTH,
    Layout,
    arrays_joined,
    assert_near,
    compile_alone,
    compile_step,
    joined,
    place_weights,
    play,
    play_alone,
)

import jkv

LATENT = Layout("latent", (("tp", 8),), AxisType.Explicit, "bfloat16")
HEADS_AND_TOKENS = (("cp", 2), ("tp", 4))
LAYOUTS = {
    "heads": AUTO,
    "int8, heads and tokens, Explicit": Layout(
        "sharded", HEADS_AND_TOKENS, AxisType.Explicit, "int8"
    ),
    "int8, heads repeated": REPEATED,
    "tokens": TOKENS,
    "latent bfloat16, heads, Explicit": LATENT,
    "latent bfloat16, heads and tokens": LATENT._replace(
        axes=HEADS_AND_TOKENS[::-1], axis_type=AxisType.Auto
    ),
    "heads on one of two axes, Explicit": TWO_AXES,
}


@pytest.mark.parametrize("name", dealt(LAYOUTS, share=3))
def test_a_donated_step_equals_one_device(name):
    """Prefill chunks and single tokens; in place, with sums as the only collectives."""
    layout = LAYOUTS[name]
    cache, weights = layout.init(), place_weights(layout)
    before = cache.storage[0].key_pool.sharding
    compiled = compile_step(cache, weights)
    cache, logits = play(cache, weights, compiled)
    reference, wanted = play_alone(layout.config)
    assert_near(logits, wanted, layout.dtype)
    assert np.abs(wanted[0] - wanted[1]).max() > 0.1  # steps differ

    jkv.check(cache)
    assert jkv.stats(cache) == jkv.stats(reference)
    assert cache.num_kv_heads == reference.num_kv_heads
    for layer in range(NUM_LAYERS):
        found, found_values, length = jax.device_get(jkv.read(cache, layer, 0))
        keys, values, _ = jax.device_get(jkv.read(reference, layer, 0))
        assert length == 7
        assert_near(found[:length], keys[:length], layout.dtype)
        assert_near(found_values[:length], values[:length], layout.dtype)

    # Each device has its shard of the storage, and all metadata.
    assert cache.storage[0].key_pool.sharding.is_equivalent_to(before, 5)
    pools, num_shares = jax.tree.leaves(cache.storage), layout.num_shares
    for pool, alone in zip(pools, jax.tree.leaves(reference.storage), strict=True):
        assert pool.nbytes == alone.nbytes * cache.sharding.copies
        for shard in pool.addressable_shards:
            assert shard.data.nbytes * num_shares == pool.nbytes
    for leaf in jax.tree.leaves(cache.metadata):
        assert leaf.sharding.is_fully_replicated
    assert_in_place(compiled, cache, num_shares)

    # Each occurs once in the loop over layers: attention's join if tokens are sharded,
    # and the model's own sum if heads are.
    axes, sums = dict(layout.axes), collections.Counter()
    if "cp" in axes:
        num_heads = NUM_HEADS // axes.get("tp", 1)
        sums += joined(NUM_ROWS, num_heads, cache.value_head_dim)
    if "tp" in axes:
        sums[f"f32[{NUM_ROWS},{WIDTH}]"] += 1
    assert arrays_joined(compiled) == sums


def assert_in_place(compiled, cache, num_shares):
    """Assert that no array as large as a layer's shard is made; shards alias."""
    pools = jax.tree.leaves(cache.storage)
    layer_size = min(math.prod(pool.shape[1:]) for pool in pools) // num_shares
    assert pool_sized_operations(compiled, layer_size) == []
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert sum(pool.nbytes for pool in pools) // num_shares <= aliased
    assert aliased < jkv.memory_profile(cache).total_bytes


@pytest.mark.one_end
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_mesh_of_one_device_compiles_like_no_mesh(axis_type):
    """The same operations on the same shapes, equally often."""
    layout = AUTO._replace(axes=(("tp", 1),), axis_type=axis_type)
    compiled = compile_step(layout.init(), place_weights(layout))
    assert count_operations(compiled) == count_operations(compile_alone(AUTO.config)[0])


def count_operations(compiled):
    lines = compiled.as_text().splitlines()
    return collections.Counter(
        found.groups() for line in lines if (found := OPERATION.search(line))
    )
