"""A small decoder for benchmarks, with rotary embeddings and gated MLPs.

The caller's `attend` stores a layer's keys and values in a cache and attends.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes of the decoder and of the step."""

    num_layers: int
    num_kv_heads: int = 4
    num_heads: int = 8
    head_dim: int = 32
    hidden_dim: int = 256
    vocabulary: int = 512
    batch_size: int = 8
    max_context_length: int = 256


Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


def compute_logits(
    params: Any,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    shapes: Shapes,
    rows: jax.Array | slice = slice(None),
) -> jax.Array:
    """Return the logits of rows, [B, V]; `attend` stores and attends in the cache."""
    hidden = params["embedding"][tokens]
    for layer, weights in enumerate(params["layers"]):
        normed = _normalised(hidden)
        queries, keys, values = (
            (normed @ weights[name]).reshape(len(tokens), -1, shapes.head_dim)
            for name in ("queries", "keys", "values")
        )
        queries, keys = _rotated(queries, positions), _rotated(keys, positions)
        mixed = attend(layer, queries, keys, values)
        hidden += mixed.reshape(len(tokens), -1) @ weights["output"]
        normed = _normalised(hidden)
        gate = jax.nn.silu(normed @ weights["gate"])
        hidden += (gate * (normed @ weights["up"])) @ weights["down"]
    return _normalised(hidden[rows]) @ params["embedding"].T


def _normalised(hidden: jax.Array) -> jax.Array:
    square = jnp.mean(hidden * hidden, axis=-1, keepdims=True)
    return hidden * jax.lax.rsqrt(square + 1e-6)


def _rotated(heads: jax.Array, positions: jax.Array) -> jax.Array:
    half = heads.shape[-1] // 2
    frequencies = np.float32(10000.0) ** (-np.arange(half, dtype=np.float32) / half)
    angles = positions[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = heads[..., :half], heads[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def describe_weights(shapes: Shapes) -> Any:
    """Return the shapes of the parameters."""
    width = shapes.num_heads * shapes.head_dim

    def matrix(rows: int, columns: int) -> Any:
        return jax.ShapeDtypeStruct((rows, columns), jnp.float32)

    layer = {
        "queries": matrix(width, width),
        "keys": matrix(width, shapes.num_kv_heads * shapes.head_dim),
        "values": matrix(width, shapes.num_kv_heads * shapes.head_dim),
        "output": matrix(width, width),
        "gate": matrix(width, shapes.hidden_dim),
        "up": matrix(width, shapes.hidden_dim),
        "down": matrix(shapes.hidden_dim, width),
    }
    return {
        "embedding": matrix(shapes.vocabulary, width),
        "layers": [dict(layer) for _ in range(shapes.num_layers)],
    }
