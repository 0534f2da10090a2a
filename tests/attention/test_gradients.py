"""Gradients of the fast path, compared with the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention.attention_workloads import Workload, make_operands
from support.jax_versions import few
from support.tolerances import assert_close, is_close

from jkv.attention import paged_attention

WORKLOAD = Workload(
    name="gradients",
    query_lengths=(1, 5, 1, 3, 0),
    context_lengths=(17, 9, 12, 3, 4),
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    value_head_dim=6,
    block_size=4,
    num_layers=2,
)
OPTIONS = {
    "plain": {},
    "window and soft cap": {"window": 5, "soft_cap": 2.0},
}


def make_loss(operands, num_rows, **options):
    """Return a loss that weighs every output and log-sum-exp differently."""
    rng = np.random.default_rng(1)
    shape = (num_rows, WORKLOAD.num_heads)
    weights = rng.standard_normal((*shape, 6)).astype(np.float32)
    lse_weights = rng.standard_normal(shape).astype(np.float32)
    tables, starts, lengths, contexts = operands[3:7]

    def loss(queries, keys, values, sinks, scale, implementation):
        output, lse = paged_attention(
            queries,
            keys,
            values,
            1,
            tables,
            None,
            starts,
            lengths,
            contexts,
            sinks=sinks,
            scale=scale,
            return_lse=True,
            implementation=implementation,
            **options,
        )
        lse = jnp.where(jnp.isneginf(lse), 0.0, lse * lse_weights)
        return jnp.sum(output * weights) + jnp.sum(lse)

    return loss


def make_variables():
    operands = make_operands(WORKLOAD)
    queries = operands.queries[1]
    queries = np.concatenate([queries, queries[:2]])  # two rows of padding
    sinks = np.linspace(-1.0, 1.0, WORKLOAD.num_heads, dtype=np.float32)
    pools = operands.key_pool, operands.value_pool
    return operands, (queries, *pools, sinks, np.float32(0.3))


@pytest.mark.parametrize("name", few(OPTIONS, "plain"))
def test_gradients_equal_the_reference(name):
    """Queries, keys, values, sinks and scale; unused slots hold NaN and get zeros."""
    operands, variables = make_variables()
    loss = make_loss(operands, len(variables[0]), **OPTIONS[name])
    gradient = jax.grad(loss, argnums=(0, 1, 2, 3, 4))
    jitted = jax.jit(gradient, static_argnums=5)
    expected = jitted(*variables, "reference")
    # With and without an outer jit.
    actual = (jitted if name == "plain" else gradient)(*variables, "xla")
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)
        assert not is_close(np.zeros_like(one), other)
    unused = np.isnan(variables[1])
    assert not np.asarray(actual[1])[unused].any()


@pytest.mark.one_end
def test_shared_blocks_accumulate_gradients_of_all_readers():
    """Two sequences over the same blocks give twice the gradient of one."""
    operands, (queries, keys, values, _, _) = make_variables()
    table = operands.block_tables[:1]

    @jax.jit
    @jax.grad
    def gradient(keys, query_lengths):
        output = paged_attention(
            jnp.broadcast_to(queries[:1], (2, *queries.shape[1:])),
            keys,
            values,
            1,
            jnp.broadcast_to(table, (2, table.shape[1])),
            None,
            jnp.arange(2, dtype=jnp.int32),
            query_lengths,
            jnp.array([17, 17], jnp.int32),
        )
        return jnp.sum(jnp.square(output))

    one, two = (np.asarray(gradient(keys, np.array([1, n], np.int32))) for n in (0, 1))
    assert one.any()
    assert_close(two, 2.0 * one)


@pytest.mark.one_end
def test_raw_bits_have_gradients_of_queries_and_sinks():
    """The values equal bfloat16 pools, which get gradients of their dtype."""
    operands, (queries, keys, values, sinks, scale) = make_variables()
    pools = [pool.astype(jnp.bfloat16) for pool in (keys, values)]
    bits = [pool.view(np.uint16) for pool in pools]
    loss = make_loss(operands, len(queries))
    d_queries, d_keys, d_sinks = jax.jit(
        jax.grad(loss, argnums=(0, 1, 3)), static_argnums=5
    )(queries, *pools, sinks, scale, "xla")
    assert d_keys.dtype == jnp.bfloat16 and d_keys.any()
    loss = make_loss(operands, len(queries), kv_dtype=jnp.bfloat16)
    actual = jax.jit(jax.grad(loss, argnums=(0, 3)), static_argnums=5)(
        queries, *bits, sinks, scale, "xla"
    )
    assert_close(actual[0], d_queries)
    assert_close(actual[1], d_sinks)


@pytest.mark.newest_further
def test_second_derivatives():
    """The plain path has them; the kernels raise an error that names it."""

    def loss(factor, implementation):
        rows = jnp.sin(jnp.arange(2 * 64, dtype=jnp.float32)).reshape(2, 1, 64)
        rows, one = rows * factor, jnp.ones((1,), jnp.int32)
        pool = jnp.zeros((1, 1, 1, 16, 64)).at[0, 0, :, :2].set(rows.swapaxes(0, 1))
        requests = one[None] * 0, None, one * 0, one * 2, one * 2
        output = paged_attention(
            rows, pool, pool, 0, *requests, implementation=implementation
        )
        return jnp.sum(output**2)

    second = jax.jit(jax.hessian(loss), static_argnums=1)
    assert_close(second(1.0, "xla"), second(1.0, "reference"))
    with pytest.raises(NotImplementedError, match=r'attend\(..., implementation="xla"'):
        second(1.0, None)
