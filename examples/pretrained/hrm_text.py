"""HRM-Text: a prefix language model with two recurrent stacks of layers.

Each pass through a stack has its own keys and values, so a model with few layers has
many layers in the cache (https://arxiv.org/abs/2506.21734).
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jkv

from .files import Tensors, find_tensors
from .settings import Settings, read_json

WEIGHTS = {
    "qkv": "attn.gqkv_proj.weight",
    "output": "attn.o_proj.weight",
    "gate_up": "mlp.gate_up_proj.weight",
    "down": "mlp.down_proj.weight",
}


@dataclasses.dataclass(frozen=True)
class HrmText:
    """Sizes of the model; callable as a `jkv.Model`."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_layers: int  # per stack
    high_cycles: int
    low_cycles: int
    embedding_scale: float
    rope_theta: float
    epsilon: float

    def cache_config(self, max_context_length: int, **sizes: Any) -> jkv.CacheConfig:
        """Return a cache configuration with the layers of all cycles."""
        return jkv.CacheConfig(
            num_layers=self.num_layers * self.high_cycles * (self.low_cycles + 1),
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            max_context_length=max_context_length,
            **sizes,
        )

    def __call__(self, params, tokens, cache, batch, *, all_rows=False):
        """Return the logits and the cache, as a `jkv.Model`."""
        high = params["embedding"][tokens] * self.embedding_scale
        low = jnp.broadcast_to(params["low"], high.shape)
        halves = jnp.arange(self.head_dim // 2, dtype=jnp.float32)
        turns = self.rope_theta ** (-2 * halves / self.head_dim)
        positions = batch.positions.astype(jnp.float32)
        angles = positions[:, None, None] * turns[None, None]
        number = 0
        for _ in range(self.high_cycles):
            for _ in range(self.low_cycles):
                given = "L_module", low + high, angles, cache, batch, number
                low, cache = self.run_stack(params, *given)
                number += self.num_layers
            given = "H_module", high + low, angles, cache, batch, number
            high, cache = self.run_stack(params, *given)
            number += self.num_layers
        if not all_rows:
            high = jnp.take(high, batch.last_rows, axis=0, mode="fill", fill_value=0)
        return (high @ params["head"].T).astype(jnp.float32), cache

    def run_stack(self, params, name, rows, angles, cache, batch, number):
        """Run a stack; return its rows and the updated cache."""
        for index, weights in enumerate(params[name]):
            heads = (self.norm(rows) @ weights["qkv"].T).reshape(
                rows.shape[0], 4 * self.num_heads, self.head_dim
            )
            gate, queries, keys, values = jnp.split(heads, 4, axis=1)
            queries, keys = turn(queries, angles), turn(keys, angles)
            layer = number + index
            cache = jkv.write(cache, layer, batch, keys, values)
            attended = jkv.attend(cache, layer, batch, queries)
            attended = (jax.nn.sigmoid(gate) * attended).reshape(rows.shape[0], -1)
            rows = rows + attended @ weights["output"].T
            gate, up = jnp.split(self.norm(rows) @ weights["gate_up"].T, 2, axis=1)
            rows = rows + (jax.nn.silu(gate) * up) @ weights["down"].T
        return self.norm(rows), cache

    def norm(self, rows):
        """Normalize rows by their root mean square."""
        wide = rows.astype(jnp.float32)
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + self.epsilon)).astype(rows.dtype)


def turn(heads, angles):
    """Rotate heads, [R, H, D], by the angles of their positions, f32[R, 1, D / 2]."""
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(heads.dtype)


def load(folder: str | Path) -> tuple[HrmText, dict[str, Any]]:
    """Load a checkpoint folder.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if it is not a checkpoint of this model, or damaged.
    """
    settings = Settings(read_json(Path(folder) / "config.json"))
    kind = settings.get("model_type")
    if kind != "hrm_text":
        raise ValueError(f"{folder} must hold an hrm_text checkpoint, got {kind!r}")
    model = HrmText(
        hidden_size=settings.count("hidden_size"),
        num_heads=settings.count("num_attention_heads"),
        head_dim=settings.count("head_dim"),
        num_layers=settings.count("num_layers_per_stack"),
        high_cycles=settings.count("H_cycles"),
        low_cycles=settings.count("L_cycles"),
        embedding_scale=settings.number("embedding_scale"),
        rope_theta=Settings(settings.part("rope_parameters")).number("rope_theta"),
        epsilon=settings.number("rms_norm_eps"),
    )
    wide, inner = model.hidden_size, settings.count("intermediate_size")
    heads = model.num_heads * model.head_dim
    tokens = settings.count("vocab_size"), wide
    shapes = {
        "qkv": (4 * heads, wide),
        "output": (wide, heads),
        "gate_up": (2 * inner, wide),
        "down": (wide, inner),
    }
    tensors = Tensors(find_tensors(Path(folder)), None)

    def read(name: str, *shape: int) -> jax.Array:
        return jnp.asarray(tensors.read(name, shape))

    embedding = read("model.embed_tokens.weight", *tokens)
    has_head = "lm_head.weight" in tensors.paths
    params: dict[str, Any] = {
        "embedding": embedding,
        "head": read("lm_head.weight", *tokens) if has_head else embedding,
        "low": read("model.z_L_init", wide),
    }
    for name in ("L_module", "H_module"):
        params[name] = [
            {
                key: read(f"model.{name}.layers.{i}.{weight}", *shapes[key])
                for key, weight in WEIGHTS.items()
            }
            for i in range(model.num_layers)
        ]
    return model, params
