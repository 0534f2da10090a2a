"""Rotary position embeddings: where a token stands, told by turning its vectors.

Pairs of components (i, i + D/2) of a query or key of position p are turned by the
angle ``p * frequency[i]``, so that a dot product of two turned vectors depends on the
distance of their positions alone (RoFormer, https://arxiv.org/abs/2104.09864). A model
trained on short texts reads longer ones when its frequencies are scaled; the two
scalings here are the ones that do not depend on the length at hand.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SCALINGS = ("default", "linear", "llama3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """How the frequencies of a model come about.

    theta: float, base of the wavelengths.
    scaling: one of ``SCALINGS``.
    factor: float, slow-down of the scaled frequencies; 1 for "default".
    low_freq_factor, high_freq_factor: floats, of "llama3" only: wavelengths above
        ``original_context / low_freq_factor`` are scaled, those below
        ``original_context / high_freq_factor`` are kept, between them it blends.
    original_context: int, tokens of context before scaling, of "llama3" only.
    """

    theta: float = 10_000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Return the angle per position of each pair of components, f32[D / 2]."""
    # In float64 until the last line: an error here grows with the position.
    base = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.scaling == "linear":
        base = base / rope.factor
    elif rope.scaling == "llama3":
        cycles = rope.original_context * base / (2 * np.pi)  # in the original context
        span = rope.high_freq_factor - rope.low_freq_factor
        kept = np.clip((cycles - rope.low_freq_factor) / span, 0, 1)
        base = kept * base + (1 - kept) * base / rope.factor
    return base.astype(np.float32)


def turns(
    rope: Rope, head_dim: int, positions: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine, each ``dtype[R, 1, D / 2]``, of positions i32[R]."""
    per_position = jnp.asarray(frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[:, None] * per_position[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return cos.astype(dtype)[:, None, :], sin.astype(dtype)[:, None, :]


def rotate(vectors: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn queries or keys [R, heads, D] by the angles of their rows."""
    first, second = jnp.split(vectors, 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def read_rope(raw: Mapping[str, Any]) -> Rope:
    """Read the rotary embedding from a config.json in its old or its new form.

    Before transformers 5: ``rope_theta`` at the top, ``rope_scaling`` (null or a dict
    that names its kind as ``rope_type`` or ``type``). Since: all in
    ``rope_parameters``.

    Raises:
        ValueError: for a kind of scaling not computed here, or a missing number.
    """
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"config.json: RoPE settings must be a dict: {parameters!r}")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError(
            "config.json gives RoPE settings per kind of layer, which is not supported:"
            f" {sorted(parameters)}; every layer must rotate alike"
        )

    def number(key: str, default: float | None = None) -> float:
        value = parameters.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(
                f"config.json: RoPE scaling needs a positive {key!r}, got {value!r}"
            )
        return float(value)

    scaling = parameters.get("rope_type", parameters.get("type")) or "default"
    if scaling not in SCALINGS:
        raise ValueError(
            f"config.json asks for RoPE scaling {scaling!r}; supported are "
            + ", ".join(SCALINGS)
        )
    partial = parameters.get(
        "partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)
    )
    if partial not in (None, 1.0):
        raise ValueError(
            f"config.json rotates only a part of each head (partial_rotary_factor "
            f"{partial!r}), which is not supported"
        )
    theta = number("rope_theta", raw.get("rope_theta", 10_000.0))
    if scaling == "default":
        return Rope(theta=theta)
    if scaling == "linear":
        return Rope(theta=theta, scaling="linear", factor=number("factor"))
    # transformers looks for the length before scaling in these three places.
    context = raw.get("original_max_position_embeddings") or parameters.get(
        "original_max_position_embeddings", raw.get("max_position_embeddings")
    )
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if high <= low or not isinstance(context, int) or context <= 0:
        raise ValueError(
            "config.json: llama3 RoPE scaling needs high_freq_factor above "
            "low_freq_factor and a positive original_max_position_embeddings, got "
            f"{high}, {low} and {context!r}"
        )
    return Rope(
        theta=theta,
        scaling="llama3",
        factor=number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=context,
    )
