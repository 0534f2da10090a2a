"""How sequences of a generation end: one reason each, the first that applies.

Symbols: Q prompts, E stop tokens, F stop sequences of C tokens at most, K lanes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.prompts import Prompts
from jkv.decoding.results import FinishReason, Generation
from jkv.decoding.scheduling.demand import blocks_for

# Beside a token of a text there can be no such number.
_ANY = -1
_NO_TOKEN = -2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stops:
    """What ends a text when its new tokens end with it."""

    tokens: jax.Array  # i32[E]
    sequences: jax.Array | None  # i32[F, C], -1 before each one, to the right

    @classmethod
    def of(cls, tokens: Any, sequences: Any | None) -> "Stops":
        """Take stop tokens, i32[E], and stop sequences, -1 after each one's end."""
        tokens = jnp.asarray(tokens, jnp.int32).reshape(-1)
        if sequences is None:
            return cls(tokens=tokens, sequences=None)
        sequences = jnp.asarray(sequences)
        if sequences.ndim != 2 or not jnp.issubdtype(sequences.dtype, jnp.integer):
            raise ValueError(
                "stop_sequences must be i32[E, W], one a row and -1 after its end, got "
                f"{sequences.dtype}{list(sequences.shape)}"
            )
        if 0 in sequences.shape:
            return cls(tokens=tokens, sequences=None)
        sequences = sequences.astype(jnp.int32)
        column = jnp.arange(sequences.shape[1], dtype=jnp.int32)[None]
        is_token = jnp.cumprod((sequences >= 0).astype(jnp.int32), axis=1)
        missing = sequences.shape[1] - jnp.sum(is_token, axis=1, dtype=jnp.int32)
        source = column - missing[:, None]
        moved = jnp.take_along_axis(sequences, jnp.maximum(source, 0), axis=1)
        return cls(tokens=tokens, sequences=jnp.where(source < 0, _ANY, moved))


class Bounds(NamedTuple):
    """How long a text can become in this cache."""

    max_context_length: int
    block_size: int
    num_blocks: jax.Array  # i32[], those it would find if it were alone

    def exceeded(self, lengths: jax.Array) -> list[tuple[FinishReason, jax.Array]]:
        """Return which texts of these lengths, i32[K], have a token without a slot."""
        blocks = blocks_for(lengths, self.block_size)
        return [
            (FinishReason.CONTEXT_FULL, lengths > self.max_context_length),
            (FinishReason.OUT_OF_BLOCKS, blocks > self.num_blocks),
        ]


def find_first(
    shape: Sequence[int], causes: list[tuple[FinishReason, jax.Array]]
) -> jax.Array:
    """Return the first cause that applies, RUNNING where none does, i32[K]."""
    reasons = jnp.full(shape, FinishReason.RUNNING, jnp.int32)
    for reason, applies in reversed(causes):
        reasons = jnp.where(applies, jnp.int32(reason), reasons)
    return reasons


def judge_prompts(prompts: Prompts, bounds: Bounds) -> jax.Array:
    """Return why prompts are not begun, RUNNING where they are, i32[Q]."""
    return find_first(
        prompts.lengths.shape,
        [
            (FinishReason.EMPTY_PROMPT, prompts.lengths == 0),
            (FinishReason.LENGTH, prompts.limits <= 0),
            *bounds.exceeded(prompts.lengths),
        ],
    )


def judge_texts(
    prompts: Prompts,
    stops: Stops,
    bounds: Bounds,
    result: Generation,
    sequences: jax.Array,
) -> jax.Array:
    """Return why texts end after their newest token, RUNNING where they go on.

    Args:
      prompts: Q of them.
      stops: what ends a text.
      bounds: how long it can become.
      result: the texts, of N sequences.
      sequences: i32[K], each with one new token at least.

    Returns:
      i32[K], `FinishReason`.
    """
    num_samples = result.tokens.shape[0] // prompts.lengths.shape[0]
    prompt = jax.lax.div(sequences, jnp.int32(num_samples))
    lengths = result.lengths[sequences]
    newest = result.tokens[sequences, jnp.maximum(lengths - 1, 0)]
    is_stop = jnp.any(newest[:, None] == stops.tokens[None], axis=1)
    if stops.sequences is not None:
        is_stop |= _ends_with_any(result, sequences, stops.sequences)
    return find_first(
        lengths.shape,
        [
            (FinishReason.STOP, is_stop),
            (FinishReason.LENGTH, lengths >= prompts.limits[prompt]),
            *bounds.exceeded(prompts.lengths[prompt] + lengths),
        ],
    )


def _ends_with_any(
    result: Generation, sequences: jax.Array, stops: jax.Array
) -> jax.Array:
    """Return which texts, i32[K], end with one of the stop sequences, bool[K]."""
    width = stops.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)[None]
    column = result.lengths[sequences][:, None] - width + place
    last = result.tokens[sequences[:, None], jnp.maximum(column, 0)]
    last = jnp.where(column < 0, _NO_TOKEN, last)
    agrees = (stops[None] == _ANY) | (stops[None] == last[:, None])
    is_stop = jnp.all(agrees, axis=2) & jnp.any(stops != _ANY, axis=1)[None]
    return jnp.any(is_stop, axis=1)
