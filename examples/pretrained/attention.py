"""Attention over the paged cache, with keys of each head or one vector for all."""

import jax
import jax.numpy as jnp

import jkv

from .config import DecoderConfig
from .layers import Weights, linear, linear_each, norm, scale_to_unit
from .parts import Latent
from .rope import rotate

Rotations = tuple[jax.Array, jax.Array]  # cosine and sine, f32[R, 1, turned dim / 2]


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
) -> tuple[jax.Array, jkv.Cache]:
    """Write a layer's keys and values, if it has its own, and attend to them.

    Args:
        config: the model's settings.
        weights: of the layer.
        x: [R, E].
        turns: rotations by position.
        cache: the cache.
        layer: i32[], the number in the cache of the layer that holds the keys.
        batch: the batch from ``append``.
        window: tokens that a row sees, itself counted.
        causal: spans of prompts do not apply.

    Returns:
        [R, E], and the cache.
    """
    latent, keys, values = config.latent, None, None
    if latent is None:
        query_heads, kv_heads = config.num_heads, config.num_kv_heads
        shares = {"query": query_heads, "key": kv_heads, "value": kv_heads}
        rows = linear_each(x, weights, shares)
        queries = _turn_heads(config, weights, rows["query"], turns, "query")
        if "key" in rows:
            dim = queries.shape[-1]
            keys = _turn_heads(config, weights, rows["key"], turns, "key", dim)
            values = _shape_values(config, rows.get("value", rows["key"]), dim)
    else:
        queries, keys = _project_latent(config, latent, weights, x, turns)
    if config.query_growth is not None:
        strength, span = config.query_growth
        steps = (batch.positions // span).astype(jnp.float32)
        grown = 1 + strength * jnp.log1p(steps)
        queries = queries * grown[:, None, None].astype(queries.dtype)
    if keys is not None:
        cache = jkv.write(cache, layer, batch, keys, values)
    heads = jkv.attend(
        cache,
        layer,
        batch,
        queries,
        scale=config.scale,
        window=window,
        soft_cap=config.soft_cap,
        sinks=weights["sinks"].astype(jnp.float32) if config.has_sinks else None,
        causal=causal,
    )
    if latent is not None:
        # From the latent vector that was attended to, to each head's value.
        heads = jnp.einsum("rhc,hvc->rhv", heads, weights["value_up"])
    heads = heads.reshape(x.shape[0], -1)
    if config.has_output_gate:
        heads = heads * jax.nn.sigmoid(linear(x, weights, "query_gate"))
    return linear(heads, weights, "output"), cache


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
    heads = rotate(heads, *turns, config.turns_neighbours)
    if config.qk_norm == "turned":
        heads = norm(config, heads, weights, f"{name}_norm")
    return heads


def _shape_values(config: DecoderConfig, rows: jax.Array, dim: int) -> jax.Array:
    """Return values [R, K, D]."""
    heads = rows.reshape(rows.shape[0], -1, dim)
    if config.has_value_norm:
        normed = scale_to_unit(heads.astype(jnp.float32), config.norm_epsilon)
        heads = normed.astype(heads.dtype)
    return heads


def _project_latent(
    config: DecoderConfig,
    latent: Latent,
    weights: Weights,
    x: jax.Array,
    turns: Rotations,
) -> tuple[jax.Array, jax.Array]:
    """Return queries [R, H, C + T] and keys [R, 1, C + T]; C components are the values.

    A head's key without position is ``key_up @ latent``. Its product with a query is
    that of the latent vector with ``query @ key_up``: so queries come to the latent
    vectors, and only these are cached (https://arxiv.org/abs/2405.04434).
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
