"""Rotary position embeddings.

Pairs of components of a query or key at position p are rotated by ``p * frequency``, so
that the dot product of two vectors depends only on the distance of their positions
(RoFormer, https://arxiv.org/abs/2104.09864). Scaled frequencies extend a model to
longer sequences than it was trained on. Two scalings, "dynamic" and "longrope", depend
on the sequence's length; `turns` explains the effect on a sequence that is computed in
parts.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

SCALINGS = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "llama3",
    "proportional",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Settings of a layer's frequencies.

    dim: int, number of rotated components of a head, the first ones.
    theta: float, base of the wavelengths.
    is_interleaved: True if pairs are adjacent, instead of `dim` / 2 components apart.
    scaling: one of ``SCALINGS``.
    factor: float, divisor of the scaled frequencies; 1 for "default".
    original_context: int, context length before scaling, in tokens.
    low_freq_factor, high_freq_factor: floats, for "llama3": wavelengths above
        ``original_context / low_freq_factor`` are scaled, wavelengths below
        ``original_context / high_freq_factor`` are kept, others are interpolated.
    fast_turns, slow_turns: floats, for "yarn": pairs with more than `fast_turns`
        rotations in the original context are kept, with less than `slow_turns` scaled.
    is_truncated: for "yarn": True if these bounds are rounded to whole pairs.
    part: float, for "proportional": fraction of the pairs that are rotated, the first
        ones; their frequencies are computed among all pairs.
    magnitude: float, for "yarn" and "longrope": factor of the rotated vectors.
    long_magnitude: float, for "longrope": the factor in sequences of more than
        `original_context` tokens; None for the same factor.
    short_factors, long_factors: for "longrope": divisor of each pair's frequency in
        sequences of up to `original_context` tokens, and in longer ones.
    """

    dim: int
    theta: float = 10_000.0
    is_interleaved: bool = False
    scaling: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    is_truncated: bool = True
    part: float = 1.0
    magnitude: float = 1.0
    long_magnitude: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


def frequencies(rope: Rope, length: int = 0) -> np.ndarray:
    """Return the angle per position of each pair, f32[dim / 2].

    Args:
        rope: settings of the frequencies.
        length: tokens of the sequence, for scalings that depend on it.
    """
    # In float64 until the last line, since errors grow with the position.
    exponents = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    base = rope.theta**-exponents
    if rope.scaling == "linear":
        base = base / rope.factor
    elif rope.scaling == "proportional":
        base = base / rope.factor
        base[int(rope.part * rope.dim // 2) :] = 0
    elif rope.scaling == "dynamic":
        base = base * _stretch(rope, max(length, rope.original_context)) ** -exponents
    elif rope.scaling == "longrope":
        is_long = length > rope.original_context
        base = base / np.asarray(rope.long_factors if is_long else rope.short_factors)
    elif rope.scaling == "yarn":
        kept = 1 - _yarn_ramp(rope)
        base = kept * base + (1 - kept) * base / rope.factor
    elif rope.scaling == "llama3":
        cycles = rope.original_context * base / (2 * np.pi)  # in the original context
        span = rope.high_freq_factor - rope.low_freq_factor
        kept = np.clip((cycles - rope.low_freq_factor) / span, 0, 1)
        base = kept * base + (1 - kept) * base / rope.factor
    return base.astype(np.float32)


def fix_length(rope: Rope, longest: int) -> Rope:
    """Return settings with frequencies that do not depend on a sequence's length.

    With "longrope", all sequences use the factors of a sequence of `longest` tokens.
    Other scalings are returned unchanged.
    """
    if rope.scaling != "longrope":
        return rope
    is_long = longest > rope.original_context
    factors = rope.long_factors if is_long else rope.short_factors
    magnitude = rope.long_magnitude if is_long else None
    return dataclasses.replace(
        rope,
        short_factors=factors,
        long_factors=factors,
        magnitude=rope.magnitude if magnitude is None else magnitude,
        long_magnitude=None,
    )


def turns(
    rope: Rope | None, dim: int, positions: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine of rows, each f32[R, 1, dim / 2].

    If the scaling depends on the sequence's length, the length after this call is used,
    as in transformers: keys of earlier calls keep their rotation.

    Args:
        rope: settings of the frequencies; None for no rotation.
        dim: number of rotated components if `rope` is None.
        positions: i32[R].
        lengths: i32[R], tokens of each row's sequence after this call.
    """
    if rope is None:
        still = (positions.shape[0], 1, dim // 2)
        return jnp.ones(still), jnp.zeros(still)
    per_position = jnp.asarray(frequencies(rope))[None, :]
    magnitude: float | jax.Array = rope.magnitude
    if rope.scaling == "longrope":
        long = jnp.asarray(frequencies(rope, rope.original_context + 1))[None, :]
        is_long = (lengths > rope.original_context)[:, None]
        per_position = jnp.where(is_long, long, per_position)
        if rope.long_magnitude is not None:
            magnitude = jnp.where(is_long, rope.long_magnitude, rope.magnitude)
    elif rope.scaling == "dynamic":
        longer = jnp.maximum(lengths, rope.original_context).astype(jnp.float32)
        exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / rope.dim
        stretch = jnp.log(_stretch(rope, longer))[:, None] * exponents[None, :]
        per_position = per_position * jnp.exp(-stretch)
    angles = positions.astype(jnp.float32)[:, None] * per_position
    cos, sin = jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude
    return cos[:, None, :], sin[:, None, :]


def rotate(
    vectors: jax.Array, cos: jax.Array, sin: jax.Array, is_interleaved: bool = False
) -> jax.Array:
    """Rotate queries or keys [R, heads, D] by the angles of their rows.

    Further components are unchanged. Interleaved pairs are returned as halves; this
    does not change the dot products of queries and keys.
    """
    dim = 2 * cos.shape[-1]
    turned, kept = vectors[..., :dim], vectors[..., dim:]
    if is_interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    cos, sin = cos.astype(vectors.dtype), sin.astype(vectors.dtype)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin, kept], axis=-1
    )


def _stretch(rope: Rope, length: int | jax.Array) -> float | jax.Array:
    """Return the factor of theta for "dynamic" at a length of `length` tokens."""
    grown = rope.factor * length / rope.original_context - (rope.factor - 1)
    return grown ** (rope.dim / (rope.dim - 2))


def _yarn_ramp(rope: Rope) -> np.ndarray:
    """Return each pair's degree of scaling, 0 to 1 (https://arxiv.org/abs/2309.00071)."""

    def find_pair(num_turns: float) -> float:
        wavelength = rope.original_context / (num_turns * 2 * math.pi)
        return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = find_pair(rope.fast_turns), find_pair(rope.slow_turns)
    if rope.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    last += 0.001 if first == last else 0
    return np.clip((np.arange(rope.dim // 2) - first) / (last - first), 0, 1)
