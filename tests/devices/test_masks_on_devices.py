"""Masks within a step on a mesh: heads are sharded, a context axis is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jkv

TREE = [-1, 0, 0, 1, 2, 2]
KEPT = [0, 2, 5]


def make_config() -> jkv.CacheConfig:
    return jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=4,
        head_dim=8,
        num_blocks=16,
        block_size=4,
        max_sequences=4,
        max_context_length=32,
    )


def run(cache):
    """Run a prompt with a span, then a tree, of which one path is kept, and peek."""
    rng = np.random.default_rng(0)

    def draw(rows, heads):
        return jnp.asarray(rng.normal(size=(rows, heads, 8)), jnp.float32)

    def step(cache, mask, rows):
        cache, batch = jkv.append(cache, [0], rows, capacity=rows, mask=mask)
        cache = jkv.write(cache, 0, batch, draw(rows, 4), draw(rows, 4))
        found = jkv.attend(cache, 0, batch, draw(rows, 8), window=7, return_lse=True)
        return cache, batch, found

    cache, _ = jkv.allocate(cache, [0])
    span = jkv.SpanMask(jnp.array([5] * 6 + [-1] * 4))
    cache, _, first = step(cache, span, 10)
    cache, batch, second = step(cache, jkv.TreeMask(jnp.array(TREE)), len(TREE))
    cache, _, status = jkv.keep_rows(cache, batch, jnp.array([KEPT]))
    peeked = jkv.peek(cache, [0], 2)
    third = jkv.attend(cache, 0, peeked, draw(2, 8), return_lse=True)
    return (first, second, third), status


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_heads_equal_one_device(axis_type):
    expected, _ = jax.jit(run)(jkv.init(make_config()))
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(axis_type,))
    cache = jkv.init(make_config(), mesh=mesh, heads="tp")
    found, status = jax.jit(run)(cache)
    assert not np.asarray(status).any()
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_a_context_axis_is_refused_by_name():
    mesh = jax.make_mesh((2,), ("cp",), axis_types=(AxisType.Auto,))
    cache = jkv.init(make_config(), mesh=mesh, context="cp")
    cache, _ = jkv.allocate(cache, [0])
    mask = jkv.SpanMask(jnp.array([1, 1]))
    cache, batch = jkv.append(cache, [0], 2, capacity=2, mask=mask)
    rows = jnp.zeros((2, 4, 8))
    cache = jkv.write(cache, 0, batch, rows, rows)
    with pytest.raises(NotImplementedError, match="on a mesh with context='cp'"):
        jkv.attend(cache, 0, batch, rows)
    with pytest.raises(NotImplementedError, match="on a mesh with a context axis"):
        jkv.keep_rows(cache, batch, jnp.array([[0]]))
    causal = jkv.attend(cache, 0, batch, rows, causal=True)
    assert causal.shape == (2, 4, 8)
