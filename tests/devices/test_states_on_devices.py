"""Recurrent states on several devices: sharded like heads, pools on an axis."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from support.states.folding_model import MODELS, continue_prompt, make_config

import jkv

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
EXPLICIT = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Explicit,) * 2)
KIND = "keys+state"
PROMPTS = [[1, 2, 3, 4, 0, 1, 2, 2, 3], [2, 1], [1, 2, 3, 4, 0, 1, 2, 2, 4], [3] * 9]

pytestmark = pytest.mark.one_end


def test_states_are_sharded_by_the_configuration():
    cache = jkv.init(make_config(KIND), mesh=MESH, heads="tp")
    spread = PartitionSpec(None, None, "tp")
    assert cache.storage[0].rows["fold"].sharding.spec == spread
    assert cache.storage[0].bases.sharding.spec == PartitionSpec()
    specs = jkv.partition_specs(cache)
    assert specs.storage[0].snapshot_rows["fold"] == spread
    assert specs.storage[0].bases == PartitionSpec()


@pytest.mark.parametrize("snapshots", [0, 3])
@pytest.mark.parametrize("pools", [None, "dp"])
def test_states_are_resharded_at_loading(tmp_path, snapshots, pools):
    """Snapshots may exist, and the order of names differs from that of sizes."""
    arrays = {"count": ((3,), "int16"), "sum": ((5, 4), "float32")}
    state = jkv.StateConfig(
        **dict(num_layers=2, max_sequences=4, max_context_length=16, block_size=4),
        **dict(num_snapshots=snapshots, snapshot_every=8 if snapshots else None),
        **dict(arrays=arrays, inputs={"x": ((2,), "int8")}, max_pending=1),
        heads_axes={"sum": 1, "x": 0},
    )
    config = jkv.GroupedConfig(
        groups=(state,), layer_groups=(0, 0), prefix_caching=bool(snapshots)
    )
    where = dict(mesh=MESH, heads="tp", pools=pools)
    cache = jkv.init(config, **where)
    ones = jax.tree.map(lambda rows: rows + 1, cache.storage[0].rows)
    states = dataclasses.replace(cache.storage[0], rows=ones)
    cache = cache.with_storage((states,))
    jkv.save(tmp_path / "cache", cache)
    loaded = jkv.load(tmp_path / "cache", **where)
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    pairs = zip(jax.tree.leaves(loaded), jax.tree.leaves(cache), strict=True)
    for found, wanted in pairs:
        np.testing.assert_array_equal(found, wanted)
        assert found.sharding.is_equivalent_to(wanted.sharding, wanted.ndim)
    spread = loaded.storage[0].rows["sum"].sharding.spec
    assert spread == PartitionSpec(*[pools] * bool(pools), None, None, None, "tp")


def on_explicit_axes(step, config, arrays, spec):
    """Return pairs of results: with arrays on Explicit axes, and on one device."""

    def run(arrays, **where):
        cache, _ = jkv.allocate(jkv.init(config, **where), [0, 0])
        return jax.tree.leaves(step(cache, *arrays))

    placed = jax.device_put(arrays, NamedSharding(EXPLICIT, PartitionSpec(*spec)))
    return zip(run(placed, mesh=EXPLICIT, heads="tp"), run(arrays), strict=True)


def decay(state, given):
    memory = state["memory"] / 2 + given["x"]
    return {"memory": memory}, (memory, memory.sum())


def dot(state, given):
    """Multiply by whole rows, which the types of Explicit axes do not resolve."""
    memory, total = decay(state, given)[1]
    return {"memory": memory}, (memory @ jnp.eye(4), total)


@pytest.mark.parametrize("spec", [(), ("dp",), (None, "tp"), ("dp", "tp"), ("tp",)])
@pytest.mark.parametrize(
    ("rule", "heads"), [(decay, True), (decay, False), (dot, True)]
)
def test_folding_on_explicit_axes(spec, rule, heads):
    """Outputs and states equal those of one device, for rows sharded in any way."""
    config = jkv.StateConfig(
        **dict(num_layers=1, max_sequences=4, max_context_length=16, block_size=4),
        arrays={"memory": ((4,), "float32")},
        heads_axes={"memory": 0} if heads else None,
    )
    rows = jax.random.normal(jax.random.key(0), (8, 4))

    @jax.jit
    def step(cache, rows):
        cache, batch = jkv.append(cache, [0, 1], [5, 1], capacity=8)
        outputs, cache = jkv.fold_state(cache, 0, batch, rule, {"x": rows})
        cache, batch = jkv.append(cache, [1, 0], [2, 1], capacity=8)
        return outputs, *jkv.fold_state(cache, 0, batch, rule, {"x": rows})

    for found, wanted in on_explicit_axes(step, config, [rows], spec):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("spec", [("dp",), (None, "tp"), ("dp", "tp")])
def test_states_are_written_from_explicit_axes(spec):
    """`write_state` stores states and inputs sharded in any way, beside spare lanes."""
    config = jkv.StateConfig(
        **dict(num_layers=1, max_sequences=4, max_context_length=16, block_size=4),
        arrays={"memory": ((4,), "float32")},
        inputs={"x": ((2,), "float32")},
        max_pending=1,
        heads_axes={"memory": 0},
    )
    states, rows = jnp.arange(8.0).reshape(2, 4), jnp.arange(16.0).reshape(8, 2)

    @jax.jit
    def step(cache, states, rows):
        cache, batch = jkv.append(cache, [0, 1], [5, 1], capacity=8)
        cache = jkv.write_state(cache, 0, batch, {"memory": states}, {"x": rows})
        return cache.storage[0].rows, cache.storage[0].inputs

    for found, wanted in on_explicit_axes(step, config, [states, rows], spec):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.further
def test_continuous_batching_over_pools_of_states(tmp_path):
    """Each rank has its own sequences and snapshots; a file has all of them."""
    where = dict(mesh=MESH, heads="tp", pools="dp")
    cache = jkv.init(make_config(KIND), **where)
    run = jax.jit(
        functools.partial(jkv.generate, MODELS[KIND]),
        static_argnames=("max_new_tokens", "max_running"),
    )
    for _ in range(2):  # cold and warm
        cache, result = run(None, cache, PROMPTS, max_new_tokens=5, max_running=2)
        wanted = [continue_prompt(prompt, 5, KIND) for prompt in PROMPTS]
        np.testing.assert_array_equal(result.tokens, wanted)
    assert int(result.statistics.cached_tokens) > 0
    jkv.save(tmp_path / "pools", cache)
    loaded = jkv.load(tmp_path / "pools", **where)
    kept = loaded.storage[0].rows["fold"].sharding.spec
    assert kept == PartitionSpec("dp", None, None, "tp")
    cache, result = run(None, loaded, PROMPTS, max_new_tokens=5, max_running=2)
    np.testing.assert_array_equal(result.tokens, wanted)
