"""Caches on a mesh: swapping, saving and resizing."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support.models.sharded_model import AUTO, REPEATED, Layout
from support.small_caches import without_refusals

import jkv

# Replicated heads, on pairs of devices that have half of every block each.
MESH = Layout("repeated", (("tp", 4), ("cp", 2)), AxisType.Explicit, "int8")
WHERE = dict(mesh=MESH.mesh, heads="tp", context="cp")
LAYER = np.int32(1)


def small(layout, **changes):
    """Return the layout's configuration with few blocks and recorded tokens."""
    changes |= dict(num_blocks=12, record_tokens=True)
    return dataclasses.replace(layout.config, **changes)


def filled(layout, where):
    """Return a cache with two sequences that share a block, after a hole."""
    config = small(layout)
    cache = jkv.init(config, **where)
    cache, opened = jkv.allocate(cache, [8, 0])
    tokens = np.arange(10, dtype=np.int32)
    cache, batch = jkv.append(cache, 1, 10, capacity=10, tokens=tokens)
    shape = 10, config.num_kv_heads, config.head_dim
    rows = np.random.default_rng(3).standard_normal(shape, np.float32)
    values = None if config.values_in_keys else -rows
    for layer in range(config.num_layers):
        cache = jkv.write(cache, layer, batch, rows * (layer + 1), values)
    cache = jkv.commit(cache, batch)
    cache, _ = jkv.fork(cache, 1)
    cache, _ = jkv.free(cache, 0)
    return cache


def contents(cache):
    """Return the rows of the second layer, and the metadata."""
    rows = [jkv.read(cache, LAYER, seq_id)[:2] for seq_id in (1, 2)]
    return [np.asarray(leaf) for leaf in jax.tree.leaves((rows, cache.metadata))]


def same(one, other):
    for found, wanted in zip(contents(one), contents(other), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.further
@pytest.mark.one_end
def test_moving_on_a_mesh_equals_one_device(tmp_path):
    """swap, save and load, compact, resize: bit-identical, with the same sharding."""
    alone, cache = filled(MESH, {}), filled(MESH, WHERE)
    same(cache, alone)
    spread = cache.storage[0].key_pool.sharding
    for change in (jkv.compact, lambda cache: jkv.resize(cache, 14)):
        cache, alone = change(cache), change(alone)
        same(cache, alone)
        assert cache.storage[0].key_pool.sharding.is_equivalent_to(spread, 5)
        jkv.check(cache)

    # The file equals that of one device, and can be loaded anywhere.
    one, other = tmp_path / "one", tmp_path / "other"
    jkv.save(one, alone)
    jkv.save(other, cache)
    assert one.read_bytes() == other.read_bytes()
    loaded = jkv.load(other)
    assert without_refusals(loaded) == without_refusals(alone)
    eight = AUTO.mesh
    same(jkv.load(other, mesh=eight, heads="tp"), alone)
    again = jkv.load(other, **WHERE)
    assert again.sharding == cache.sharding
    assert without_refusals(again) == without_refusals(cache)

    # Sequences are swapped from the mesh to one device, and back.
    cache, swapped = jkv.swap_out(cache, [1, 2])
    alone, swapped_alone = jkv.swap_out(alone, [1, 2])
    for found, wanted in zip(
        jax.tree.leaves(swapped.groups[0].contents.storage),
        jax.tree.leaves(swapped_alone.groups[0].contents.storage),
        strict=True,
    ):
        np.testing.assert_array_equal(found, wanted)
    cache, back = jkv.swap_in(cache, swapped_alone, donate=True)
    alone, _ = jkv.swap_in(alone, swapped)
    assert back.status.tolist() == [jkv.Status.OK] * 2
    same(cache, alone)
    assert cache.storage[0].key_pool.sharding.is_equivalent_to(spread, 5)
    jkv.check(cache)


@pytest.mark.one_end
def test_configurations_that_do_not_divide_over_a_mesh_are_refused():
    mesh = AUTO.mesh
    with pytest.raises(ValueError, match="'tp' has 8 devices, .* 3 kv heads"):
        jkv.init(small(AUTO, num_kv_heads=3), mesh=mesh, heads="tp")
    with pytest.raises(ValueError, match="'heads' must be an axis .* has 'tp'"):
        jkv.init(small(AUTO), mesh=mesh, heads="heads")
    with pytest.raises(ValueError, match="mesh is required with heads='tp'"):
        jkv.init(small(AUTO), heads="tp")
    with pytest.raises(ValueError, match="of the 8 devices .* got 4; set it to 128"):
        jkv.init(small(AUTO), mesh=mesh, context="tp")
    with pytest.raises(ValueError, match="heads and context must be different"):
        jkv.init(small(AUTO), mesh=mesh, heads="tp", context="tp")
    with pytest.raises(ValueError, match="both device and mesh"):
        jkv.init(small(AUTO), mesh=mesh, device=jax.devices()[0])
    cache = jkv.init(small(REPEATED), mesh=mesh, heads="tp")
    cache, batch = jkv.append(jkv.allocate(cache, 0)[0], 0)
    with pytest.raises(ValueError, match="8 devices .* got 12 heads"):
        jkv.attend(cache, 0, batch, np.zeros((1, 12, 16), np.float32))


@pytest.mark.one_end
def test_without_a_sharded_axis_all_arrays_are_replicated():
    """An axis of one device, or none, shards nothing; the mesh is recorded."""
    one = Layout("sharded", (("dp", 8), ("tp", 1)), AxisType.Auto)
    for options in ({"heads": "tp"}, {"context": "tp"}, {}):
        cache = jkv.init(small(one), mesh=one.mesh, **options)
        assert cache.sharding.axes == () and cache.sharding.mesh == one.mesh
        for leaf in jax.tree.leaves(cache):
            assert leaf.sharding.is_fully_replicated and len(leaf.devices()) == 8
        specs = jkv.partition_specs(small(one), mesh=one.mesh, **options)
        assert not any(tuple(spec) for spec in jax.tree.leaves(specs))
