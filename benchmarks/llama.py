"""A decoder of Llama 3's shape with random weights, as a `jkv.Model`.

Sizes are of the Llama 3 8B release (arXiv 2407.21783, table 3). Weights are bfloat16,
or one byte per element with a bfloat16 scale per column.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jkv


@dataclasses.dataclass(frozen=True)
class Llama:
    """Sizes of the decoder, and its step."""

    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden_dim: int = 14_336
    vocabulary: int = 128_256
    rope_base: float = 500_000.0

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.num_heads * self.head_dim

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of a layer, [in, out]."""
        kv_width = self.num_kv_heads * self.head_dim
        return {
            "queries": (self.width, self.width),
            "keys": (self.width, kv_width),
            "values": (self.width, kv_width),
            "output": (self.width, self.width),
            "gate": (self.width, self.hidden_dim),
            "up": (self.width, self.hidden_dim),
            "down": (self.hidden_dim, self.width),
        }

    def __call__(
        self, params: Any, tokens: jax.Array, cache: jkv.Cache, batch: jkv.Batch
    ) -> tuple[jax.Array, jkv.Cache]:
        """Run one step: return f32[B, V] and the cache."""
        hidden = params["embedding"][tokens]
        angles = self._find_angles(batch.positions)
        for layer, weights in enumerate(params["layers"]):
            normed = _normalise(hidden, weights["attention norm"])
            queries, keys, values = (
                multiply(normed, weights[name]).reshape(len(tokens), -1, self.head_dim)
                for name in ("queries", "keys", "values")
            )
            queries, keys = _rotate(queries, angles), _rotate(keys, angles)
            cache = jkv.write(cache, layer, batch, keys, values)
            mixed = jkv.attend(cache, layer, batch, queries)
            hidden += multiply(mixed.reshape(hidden.shape), weights["output"])
            normed = _normalise(hidden, weights["norm"])
            gate = jax.nn.silu(multiply(normed, weights["gate"]))
            hidden += multiply(gate * multiply(normed, weights["up"]), weights["down"])
        last = hidden[jnp.minimum(batch.last_rows, batch.num_rows - 1)]
        last = _normalise(last, params["norm"])
        return multiply(last, params["head"]).astype(jnp.float32), cache

    def _find_angles(self, positions: jax.Array) -> jax.Array:
        half = self.head_dim // 2
        powers = jnp.arange(half, dtype=jnp.float32) / half
        return positions[:, None].astype(jnp.float32) * self.rope_base**-powers

    def draw_params(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """Draw random weights, each by its own program.

        Args:
            dtype: of the matrices: "bfloat16", "int8" or "float8_e4m3fn".
        """
        keys = iter(jax.random.split(jax.random.key(0), 8 * self.num_layers + 2))
        ones = jnp.ones((self.width,), jnp.bfloat16)
        embedding = (self.vocabulary, self.width)
        return {
            "embedding": _draw(next(keys), embedding, "bfloat16")["elements"],
            "layers": [
                {
                    name: _draw(next(keys), shape, dtype)
                    for name, shape in self.matrices.items()
                }
                | {"attention norm": ones, "norm": ones}
                for _ in range(self.num_layers)
            ],
            "norm": ones,
            "head": _draw(next(keys), (self.width, self.vocabulary), dtype),
        }


def multiply(rows: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Multiply rows by a matrix; one-byte elements are widened on load."""
    found = rows @ weights["elements"].astype(rows.dtype)
    return found * weights["scales"] if "scales" in weights else found


def count_step_bytes(params: dict[str, Any]) -> int:
    """Return the weight bytes that a step reads: all but the embedding."""
    read = {name: value for name, value in params.items() if name != "embedding"}
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(read))


def _draw(key: jax.Array, shape: tuple[int, int], dtype: str) -> dict[str, jax.Array]:
    """Draw a matrix that preserves the scale of a row."""
    return dict(_draw_matrix(key, shape=shape, dtype=dtype))


def _draw_matrix_of(
    key: jax.Array, *, shape: tuple[int, int], dtype: str
) -> dict[str, jax.Array]:
    rows = jax.random.normal(key, shape, jnp.bfloat16)
    size = jnp.bfloat16(shape[0] ** -0.5)
    if dtype == "bfloat16":
        return {"elements": rows * size}
    # 4 standard deviations fit; values beyond are clipped.
    largest = 127.0 if dtype == "int8" else 448.0
    scaled = jnp.clip(rows.astype(jnp.float32) * (largest / 4), -largest, largest)
    scaled = jnp.round(scaled) if dtype == "int8" else scaled
    scales = jnp.full((shape[1],), 4 / largest, jnp.bfloat16) * size
    return {"elements": scaled.astype(dtype), "scales": scales}


_draw_matrix = jax.jit(_draw_matrix_of, static_argnames=("shape", "dtype"))


def _normalise(hidden: jax.Array, weights: jax.Array) -> jax.Array:
    wide = hidden.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + 1e-5)).astype(hidden.dtype) * weights


def _rotate(heads: jax.Array, angles: jax.Array) -> jax.Array:
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(heads.dtype)
