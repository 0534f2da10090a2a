"""Attention over the paged cache: grouped-query and multi-head latent attention."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

import jkv
from jkv.drafters import hide_first

from .config import DecoderConfig
from .layers import Weights, linear, linear_each, norm, norm_plainly
from .parts import Latent, OutputGate
from .rope import rotate

Rotations = tuple[jax.Array, jax.Array]  # cosine and sine, f32[R, 1, rotated dim / 2]


def attend(
    config: DecoderConfig,
    weights: Weights,
    x: jax.Array,
    turns: Rotations,
    cache: jkv.Cache,
    layer: jax.Array,
    batch: jkv.Batch,
    window: int | jax.Array | None,
    *,
    causal: bool = False,
    projected: Mapping[str, jax.Array] | None = None,
) -> tuple[jax.Array, jkv.Cache]:
    """Write a layer's keys and values, if it has its own, and attend to them.

    Args:
        config: the model's configuration.
        weights: the layer's parameters.
        x: [R, E].
        turns: cosine and sine of each row's position.
        cache: the cache.
        layer: i32[], index in the cache of the layer with the keys.
        batch: the batch from ``append``.
        window: sliding window in tokens, including the row itself; None for all.
        causal: ignore the spans of prompts.
        projected: queries, keys and values by name, instead of projections of `x`.

    Returns:
        [R, E], and the cache.
    """
    latent, keys, values = config.latent, None, None
    if latent is None:
        query_heads, kv_heads = config.num_heads, config.num_kv_heads
        shares = {"query": query_heads, "key": kv_heads, "value": kv_heads}
        rows = linear_each(x, weights, shares) if projected is None else projected
        queries = _turn_heads(config, weights, rows["query"], turns, "query")
        if "key" in rows:
            dim = queries.shape[-1]
            keys = _turn_heads(config, weights, rows["key"], turns, "key", dim)
            values = _shape_values(config, rows.get("value", rows["key"]), dim)
    else:
        queries, keys = _project_latent(config, latent, weights, x, turns)
    scale = config.scale
    if config.hides_first and keys is not None:
        scale = queries.shape[-1] ** -0.5 if scale is None else scale
        keys, queries = hide_first(keys, queries, batch.positions)
    if config.query_growth is not None:
        strength, span = config.query_growth
        steps = (batch.positions // span).astype(jnp.float32)
        grown = 1 + strength * jnp.log1p(steps)
        queries = queries * grown[:, None, None].astype(queries.dtype)
    if keys is not None:
        cache = jkv.write(cache, layer, batch, keys, values)
        cache = jkv.observe(cache, layer, batch, queries)
    heads = jkv.attend(
        cache,
        layer,
        batch,
        queries,
        scale=scale,
        window=window,
        soft_cap=config.soft_cap,
        sinks=weights["sinks"].astype(jnp.float32) if config.has_sinks else None,
        causal=causal,
    )
    if latent is not None:
        # Project the attended latent vector to each head's value.
        heads = jnp.einsum("rhc,hvc->rhv", heads, weights["value_up"])
    if config.output_gate is not None:
        heads = heads * _weigh_outputs(config.output_gate, weights, x, heads.shape)
    return linear(heads.reshape(x.shape[0], -1), weights, "output"), cache


def write_keys(
    config: DecoderConfig,
    weights: Weights,
    x: jax.Array,
    turns: Rotations,
    cache: jkv.Cache,
    layer: int,
    batch: jkv.Batch,
) -> jkv.Cache:
    """Write the keys and values of rows [R, E] without attention."""
    dim = config.head_dim
    keys = linear(x, weights, "key")
    keys = _turn_heads(config, weights, keys, turns, "key", dim)
    values = _shape_values(config, linear(x, weights, "value"), dim)
    return jkv.write(cache, layer, batch, keys, values)


def _turn_heads(
    config: DecoderConfig,
    weights: Weights,
    rows: jax.Array,
    turns: Rotations,
    name: str,
    dim: int | None = None,
) -> jax.Array:
    """Return rotated queries [R, H, D], with D inferred, or keys [R, K, D]."""
    if config.qk_norm == "all":
        rows = norm(config, rows, weights, f"{name}_norm")
    heads = rows.reshape(rows.shape[0], -1, dim or rows.shape[-1] // config.num_heads)
    if config.qk_norm in ("head", "heads"):
        heads = norm(config, heads, weights, f"{name}_norm")
    elif config.qk_norm == "unit":
        heads = norm_plainly(config, heads)
    heads = rotate(heads, *turns, config.turns_neighbours)
    if config.qk_norm == "turned":
        heads = norm(config, heads, weights, f"{name}_norm")
    return heads


def _shape_values(config: DecoderConfig, rows: jax.Array, dim: int) -> jax.Array:
    """Return values [R, K, D]."""
    heads = rows.reshape(rows.shape[0], -1, dim)
    if config.has_value_norm:
        heads = norm_plainly(config, heads)
    return heads


def _weigh_outputs(
    gate: OutputGate, weights: Weights, x: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Return the gates of outputs of `shape` [R, H, D]; [R, H, 1] for one per head."""
    rows = linear(x, weights, "query_gate").reshape(*shape[:2], -1)
    function = jax.nn.softplus if gate.function == "softplus" else jax.nn.sigmoid
    return function(rows.astype(jnp.float32)).astype(x.dtype)


def _project_latent(
    config: DecoderConfig,
    latent: Latent,
    weights: Weights,
    x: jax.Array,
    turns: Rotations,
) -> tuple[jax.Array, jax.Array]:
    """Return queries [R, H, C + T] and keys [R, 1, C + T]; values are the first C.

    A head's key without RoPE is ``key_up @ latent``. Its product with a query equals
    that of the latent vector with ``query @ key_up``, so that ``key_up`` is absorbed
    into the queries and only latent vectors and rotated keys are cached
    (https://arxiv.org/abs/2405.04434).
    """
    if latent.query_rank is None:
        queries = linear(x, weights, "query")
    else:
        squeezed = linear(x, weights, "query_down")
        squeezed = norm(config, squeezed, weights, "query_down_norm")
        queries = linear(squeezed, weights, "query_up")
    queries = queries.reshape(x.shape[0], config.num_heads, -1)
    plain, turned = jnp.split(queries, [latent.plain_dim], axis=-1)
    absorbed = jnp.einsum("rhp,hpc->rhc", plain, weights["key_up"])

    vectors, shared = jnp.split(linear(x, weights, "latent"), [latent.rank], axis=-1)
    vectors = norm(config, vectors, weights, "latent_norm")
    shared = rotate(shared[:, None, :], *turns, config.turns_neighbours)
    turned = rotate(turned, *turns, config.turns_neighbours)
    return (
        jnp.concatenate([absorbed, turned], axis=-1),
        jnp.concatenate([vectors[:, None, :], shared], axis=-1),
    )
