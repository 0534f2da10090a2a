"""The fast path without a custom kernel: loops over gathered chunks of blocks.

Requests of one row go through `decode.py`, the others through `prefill.py`; each loop
makes no trip when it has no work. The derivative is in `gradients.py`.

Decoding is bound by reading the keys and values once. Without a kernel XLA cannot
multiply out of scattered blocks: it copies a chunk of them into the cache and reads it
there. Of the processor time of 16 sequences of 1000 tokens (8 kv heads of 64, float32,
JAX 0.10.2, two cores of an AMD EPYC) that copy takes about 62%, the two products 13%,
softmax, joining and the dispatch of small operations 25%; a plain `jnp.sum` over as
many bytes takes 35 to 45% of the whole. With four query heads per kv head the products
take about half of the time.
"""

import functools

import jax
import jax.numpy as jnp

from jkv.attention.decode import attend_decode
from jkv.attention.gradients import attend_backward
from jkv.attention.prefill import attend_prefill
from jkv.attention.requests import Requests


@functools.partial(jax.jit, static_argnames=("soft_cap", "kv_dtype"))
def attend_xla(
    queries: jax.Array,  # f32[R, H, D], not scaled
    key_pool: jax.Array,  # [L, N, K, T, D]
    value_pool: jax.Array,  # [L, N, K, T, Dv]
    layer: jax.Array,  # i32[]
    requests: Requests,
    *,
    scale: jax.Array,  # f32[]
    window: jax.Array | None,  # i32[]
    soft_cap: float | None,
    sinks: jax.Array | None,  # f32[H]
    kv_dtype: jax.typing.DTypeLike | None,
) -> tuple[jax.Array, jax.Array]:
    """Return `f32[R, H, Dv]` and the log-sum-exp `f32[R, H]`."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = key_pool.shape[2]
    output, lse = _attend(
        soft_cap,
        kv_dtype,
        (queries * scale).reshape(num_rows, num_kv_heads, -1, head_dim),
        key_pool,
        value_pool,
        None if sinks is None else sinks.reshape(num_kv_heads, -1),
        layer,
        requests,
        window,
    )
    return (
        output.reshape(num_rows, num_heads, -1),
        lse.reshape(num_rows, num_heads),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    soft_cap: float | None,
    kv_dtype: jax.typing.DTypeLike | None,
    queries: jax.Array,  # f32[R, K, G, D], scaled
    key_pool: jax.Array,
    value_pool: jax.Array,
    sinks: jax.Array | None,  # f32[K, G]
    layer: jax.Array,
    requests: Requests,
    window: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return `f32[R, K, G, Dv]` and `f32[R, K, G]`."""
    output, lse = attend_decode(
        queries,
        key_pool,
        value_pool,
        layer,
        requests,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        kv_dtype=kv_dtype,
    )
    return attend_prefill(
        queries,
        key_pool,
        value_pool,
        layer,
        requests,
        output,
        lse,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        kv_dtype=kv_dtype,
    )


def _forward(soft_cap, kv_dtype, *operands):  # type: ignore[no-untyped-def]
    output, lse = _attend(soft_cap, kv_dtype, *operands)
    return (output, lse), (operands, output, lse)


def _backward(soft_cap, kv_dtype, saved, cotangents):  # type: ignore[no-untyped-def]
    operands, output, lse = saved
    queries, key_pool, value_pool, sinks, layer, requests, window = operands
    d_output, d_lse = cotangents
    # d score = weight * (d weight - delta), summed over what the softmax couples.
    delta = jnp.sum(d_output * output, axis=-1) - d_lse
    grads = attend_backward(
        queries,
        key_pool,
        value_pool,
        layer,
        requests,
        lse,
        d_output,
        delta,
        window=window,
        soft_cap=soft_cap,
        kv_dtype=kv_dtype,
    )
    d_pools = (
        None if grad is None else grad.astype(pool.dtype)
        for grad, pool in (
            (grads.key_pool, key_pool),
            (grads.value_pool, value_pool),
        )
    )
    d_sinks = None
    if sinks is not None:
        # A sink is a token with the value zero. Rows that see nothing have none.
        weight = jnp.exp(sinks[None] - jnp.where(jnp.isneginf(lse), jnp.inf, lse))
        d_sinks = -jnp.sum(weight * delta, axis=0)
    return (grads.queries, *d_pools, d_sinks, None, None, None)


_attend.defvjp(_forward, _backward)
