"""Gradients of attention with sharded heads, or sharded tokens of blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.jax_versions import dealt
from support.models.sharded_model import AUTO
from support.tolerances import assert_close, is_close

import jkv

NUM_ROWS = 9
CONFIG = dataclasses.replace(AUTO.config, num_layers=1, num_blocks=12, block_size=4)


def loss(rows, cache, implementation=None):
    """Return a loss over a step of a chunk and a token, which attend to all tokens."""
    keys, values, queries, sinks = rows
    cache, _ = jkv.allocate(cache, [0, 0])
    cache, batch = jkv.append(cache, [0, 1], [8, 1], capacity=NUM_ROWS)
    cache = jkv.write(cache, 0, batch, keys, values)
    options = {"sinks": sinks, "soft_cap": 4.0, "implementation": implementation}
    found = jkv.attend(cache, 0, batch, queries, **options)
    return jnp.sum(jnp.sin(3 * found))


@functools.cache
def make_rows():
    rng = np.random.default_rng(2)
    shapes = [(NUM_ROWS, 8, 16)] * 2 + [(NUM_ROWS, 16, 16), (16,)]
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


@functools.cache
def differentiate_alone():
    return jax.jit(jax.grad(loss))(make_rows(), jkv.init(CONFIG))


def through_jkv(implementation=None):
    """Four devices have different heads, and pairs of them half of each block."""
    mesh = AUTO._replace(axes=(("tp", 4), ("cp", 2))).mesh
    cache = jkv.init(CONFIG, mesh=mesh, heads="tp", context="cp")
    return jax.jit(jax.grad(loss), static_argnums=2)(make_rows(), cache, implementation)


def in_shard_map(implementation=None):
    """In the user's own `shard_map`, each device differentiates its heads."""
    cache = jkv.init(CONFIG, mesh=AUTO.mesh, heads="tp")
    heads = PartitionSpec(None, "tp")
    specs = [heads, heads, heads, PartitionSpec("tp")]
    mapped = jax.shard_map(
        functools.partial(jax.grad(loss), implementation=implementation),
        mesh=AUTO.mesh,
        in_specs=(specs, jkv.partition_specs(cache)),
        out_specs=specs,
    )
    return jax.jit(mapped)(make_rows(), cache)


@pytest.mark.parametrize("differentiate", dealt([through_jkv, in_shard_map]))
def test_sharded_gradients_equal_one_device(differentiate):
    found, wanted = differentiate(), differentiate_alone()
    for here, there in zip(found, wanted, strict=True):
        assert_close(here, there)
        assert np.abs(there).max() > 0.1
    assert not is_close(found[0], wanted[1])


@pytest.mark.further
@pytest.mark.parametrize("differentiate", [through_jkv, in_shard_map])
def test_sharded_kernel_gradients_equal_one_device(differentiate):
    found, wanted = differentiate("pallas"), differentiate_alone()
    for here, there in zip(found, wanted, strict=True):
        assert_close(here, there)
