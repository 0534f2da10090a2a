"""The derivative of attention, of whichever implementation computed the result.

As in FlashAttention (arXiv 2205.14135, appendix B) nothing is kept but the result and
its log-sum-exp: the weights are computed anew from the scores. What the softmax couples
is one number for each row and head, `delta`, which is found here; so are the cotangents
of sinks and of the scale. Those of queries, keys and values are the implementation's.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jkv.attention.call import Call
from jkv.sharding.varying import is_manual, vary_over, varying_axes


class Cotangents(NamedTuple):
    """What a backward pass reads of each row and head, beside the call."""

    d_output: jax.Array  # [R, H, Dv], in the output's dtype
    lse: jax.Array  # f32[R, H], -inf for a row that sees nothing
    # d score = weight * (d weight - delta): what the softmax couples, summed up.
    delta: jax.Array  # f32[R, H], sum(d_output * output) - d_lse


class Gradients(NamedTuple):
    """Cotangents of what is multiplied; of the pools None unless they hold floats."""

    queries: jax.Array  # f32[R, H, D], of the scaled queries
    keys: jax.Array | None  # [L, N, K, T, D], in the pool's dtype
    values: jax.Array | None  # [L, N, K, T, Dv], None also if they lie in the keys


class Attention(Protocol):
    """How a call is computed, and how its derivative is. A hashable value."""

    def attend(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """Attend where nothing is differentiated, with a log-sum-exp or without."""

    def attend_with_lse(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """Attend where there shall be a derivative."""

    def differentiate(self, call: Call, cotangents: Cotangents) -> Gradients:
        """From the rows of requests to the tokens that they see; elsewhere zeros."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(attention: Attention, call: Call) -> tuple[jax.Array, jax.Array]:
    """Attend by what need not be differentiable itself."""
    return attention.attend(call)


@functools.partial(jax.jit, static_argnums=0)
def attend_differentiably(
    attention: Attention, call: Call
) -> tuple[jax.Array, jax.Array]:
    """Attend, with a derivative that JAX is told.

    Jitted, so that calls of equal shapes, dtypes and static fields are traced and
    lowered once, and an eager backward pass is compiled. Inside `shard_map` a gradient
    varies over all axes that anything here varies over, so the arguments do too: what
    was the same on several devices has its gradient summed over them.
    """
    if is_manual():
        call = vary_over(call, varying_axes(call))
    return _attend(attention, call)


def _forward(attention, call):  # type: ignore[no-untyped-def]
    output, lse = attention.attend_with_lse(call)
    return (output, lse), (call, output, lse)


def _backward(attention, saved, cotangents):  # type: ignore[no-untyped-def]
    call, output, lse = saved
    d_output, d_lse = cotangents
    delta = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    delta -= d_lse
    grads = attention.differentiate(call, Cotangents(d_output, lse, delta))
    # Rows that see nothing bring nothing, and may hold NaN: 0 * NaN is NaN.
    sees = ~jnp.isneginf(lse)
    of_scale = grads.queries * call.queries.astype(jnp.float32)
    # None stands for what has no gradient: integers, raw bits, scales of tokens.
    gradient = dataclasses.replace(
        call,
        queries=(grads.queries * call.scale).astype(call.queries.dtype),
        pools=dataclasses.replace(
            call.pools,
            keys=grads.keys,
            values=grads.values,
            key_scales=None,
            value_scales=None,
        ),
        scale=jnp.sum(jnp.where(sees[..., None], of_scale, 0.0)),
        sinks=_differentiate_sinks(call.sinks, lse, delta),
        layer=None,
        requests=None,
        window=None,
        part=None,
        plans=None,
    )
    return (gradient,)


_attend.defvjp(_forward, _backward)


def _differentiate_sinks(
    sinks: jax.Array | None,  # f32[H]
    lse: jax.Array,  # f32[R, H]
    delta: jax.Array,  # f32[R, H]
) -> jax.Array | None:
    """A sink is a token with the value zero. Rows that see nothing have none."""
    if sinks is None:
        return None
    each = jnp.exp(sinks[None] - lse) * delta
    return -jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, each), axis=0)


def shape_gradients(call: Call) -> Gradients:
    """Return the shapes and dtypes of what a backward pass gives."""
    queries = jax.ShapeDtypeStruct(call.queries.shape, jnp.float32)
    pools = map(_shape_gradient, (call.pools.keys, call.pools.values))
    shapes: tuple[Any, ...] = queries, *pools
    return Gradients(*shapes)


def _shape_gradient(pool: jax.Array | None) -> jax.ShapeDtypeStruct | None:
    """Return that of a pool of whole floats, None for what has no gradient."""
    if pool is None or not jnp.issubdtype(pool.dtype, jnp.floating):
        return None
    if pool.dtype.itemsize == 1:
        return None
    return jax.ShapeDtypeStruct(pool.shape, pool.dtype)
