"""Kernels with sharded heads: interpreted on a CPU, lowered for ROCm GPUs."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec, use_abstract_mesh
from support.attention.kernel_lowering import find_kernels, mesh_of_cards, shape
from support.compiled_hlo import ALL_PASSES
from support.jax_versions import IS_NEWEST, dealt
from support.models.sharded_model import AUTO, REPEATED, collectives
from support.tolerances import assert_close, is_close

import jkv
from jkv.attention.kernel.backend import Way
from jkv.attention.kernel.launches.slots import store_rows
from jkv.sharding.storage_sharding import StorageSharding
from jkv.verbs import writing


def attend_step(cache, rows, queries, implementation=None):
    """Attend with prompts of five tokens and of one, in one layer."""
    cache, _ = jkv.allocate(cache, [0, 0])
    cache, batch = jkv.append(cache, [0, 1], [5, 1], capacity=6)
    cache = jkv.write(cache, 1, batch, rows, -rows)
    return jkv.attend(cache, 1, batch, queries, implementation=implementation)


def make_rows(config, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (6, config.num_kv_heads, 16), (6, 16, 16)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("is_manual", dealt([False, True]))
def test_the_interpreted_kernel_equals_the_plain_path(is_manual):
    layout = AUTO if is_manual else REPEATED
    cache, rows = layout.init(), make_rows(layout.config)

    def attend(cache, rows, queries):
        return attend_step(cache, rows, queries, "pallas")

    function = attend
    if is_manual:
        heads = PartitionSpec(None, "tp")
        specs = jkv.partition_specs(cache), heads, heads
        function = jax.shard_map(
            attend, mesh=layout.mesh, in_specs=specs, out_specs=heads
        )
    compiled = jax.jit(function).lower(cache, *rows).compile(ALL_PASSES)
    found = compiled(cache, *rows)
    assert collectives(compiled) == {}
    wanted = attend_step(jkv.init(layout.config), *rows, "xla")
    assert_close(found, wanted)
    assert not is_close(jnp.zeros_like(found), wanted)


@pytest.mark.parametrize("dtype", dealt(["bfloat16", "int8", "float32"]))
def test_each_device_stores_its_shard(dtype, monkeypatch):
    """Two of four kv heads, and half of the tokens of each block, by the kernel."""
    config = dataclasses.replace(
        AUTO.config, num_kv_heads=4, num_blocks=4, dtype=dtype, value_head_dim=None
    )
    mesh = jax.make_mesh((2, 2), ("tp", "cp"), (AxisType.Auto,) * 2)
    random = np.random.default_rng(0)
    rows = jnp.asarray(random.standard_normal((6, 4, 16)), jnp.bfloat16)
    launched = []

    def find_stores(write):
        launched.append(write.pool.shape)
        return {"cpu": functools.partial(store_rows, way=Way(interpret=True))}

    def store(cache):
        cache, _ = jkv.allocate(cache, [0, 0])
        cache, batch = jkv.append(cache, [0, 1], [4, 1], capacity=6)
        return jkv.write(cache, 1, batch, rows, -rows).storage[0].arrays

    monkeypatch.setattr(writing, "find_stores", find_stores)
    cache = jkv.init(config, mesh=mesh, heads="tp", context="cp")
    found = jax.jit(store)(cache)
    assert set(launched) == {(2, 4, 2, 2, 16)}
    wanted = jax.jit(store)(jkv.init(config))
    monkeypatch.setenv(writing.WRITE_SWITCH, "0")
    scattered = jax.jit(lambda cache: store(cache))(jkv.init(config))
    assert len(launched) == 2  # on the mesh, and on one device
    for name, array in scattered.items():
        assert np.asarray(array).any()
        for other in (found, wanted):
            np.testing.assert_array_equal(np.asarray(other[name]), np.asarray(array))


MESHES = itertools.product([AxisType.Auto, AxisType.Explicit], [1, 2])


@pytest.mark.parametrize("axis_type, context", dealt(MESHES, turn=2, share=4), ids=str)
def test_each_gpu_launches_the_kernel_for_its_shard(axis_type, context):
    """Eight ROCm GPUs with one of eight heads each, without user options.

    Or pairs of GPUs with two heads each; both have half of every block.
    """
    config = dataclasses.replace(
        AUTO.config, head_dim=64, value_head_dim=64, dtype="bfloat16"
    )
    mesh = mesh_of_cards("rocm", {"tp": 8 // context, "cp": context}, axis_type)
    cache = jax.eval_shape(lambda: jkv.init(config))
    sharding = StorageSharding(mesh, "tp", "cp" if context > 1 else None)
    (storage,) = cache.storage
    cache = cache.with_storage((dataclasses.replace(storage, sharding=sharding),))
    rows, queries = (
        shape(6, 8, 64, dtype="bfloat16"),
        shape(6, 32, 64, dtype="bfloat16"),
    )

    def lower(implementation):
        attend = functools.partial(attend_step, implementation=implementation)
        with use_abstract_mesh(mesh):
            traced = jax.jit(attend).trace(cache, rows, queries)
            return traced.lower(lowering_platforms=("rocm",))

    lowered = lower(None)
    *stores, decode, join, prefill, isolate = find_kernels(lowered)
    # jkv's own lowering gives the same kernels.
    assert find_kernels(lower("triton"))[-4:] == [decode, join, prefill, isolate]
    names = [kernel.name for kernel in (decode, join, prefill, isolate)]
    assert names == ["jkv_decode", "jkv_join", "jkv_prefill", "jkv_isolate"]
    # A kernel stores rows if the GPU is known, as it is from JAX 0.11 on.
    assert [store.name for store in stores] == ["jkv_store"] * IS_NEWEST
    for store in stores:
        assert store.grid == (6, context, 1)  # rows, kv heads of a GPU
    # One kv head with its four query heads, or two.
    assert join.grid[1] == 4 * context
    assert lowered.as_text().count("stablehlo.all_reduce") == (2 if context > 1 else 0)
