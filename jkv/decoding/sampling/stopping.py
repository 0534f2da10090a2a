"""Stopping: why a text ends, the first reason that applies.

Symbols: Q prompts, E stop tokens, F stop sequences of C tokens at most, K lanes. What
stops all prompts alike has one row for all Q of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.steering.rows import find_unknown
from jkv.decoding.texts.blocks import Blocks, BlockSize, of_tokens, reach
from jkv.decoding.texts.prompts import Prompts, find_malformed
from jkv.decoding.texts.results import FinishReason, Generation
from jkv.decoding.texts.stops import ANY, Stops
from jkv.indexing import gather
from jkv.steering import Steering

# Beside a token of a text there can be no such number.
_NO_TOKEN = -2


class Bounds(NamedTuple):
    """How long a text can become in this cache."""

    max_context_length: jax.Array | int  # i32[K] where texts differ
    block_size: BlockSize
    num_blocks: Blocks  # i32[], those it would find if it were alone

    def exceeded(self, lengths: jax.Array) -> list[tuple[FinishReason, jax.Array]]:
        """Return which texts of these lengths, i32[K], have a token without a slot."""
        has_blocks = reach(self.num_blocks, of_tokens(lengths, self.block_size))
        return [
            (FinishReason.CONTEXT_FULL, lengths > self.max_context_length),
            (FinishReason.OUT_OF_BLOCKS, ~has_blocks),
        ]


class Progress(NamedTuple):
    """How far the texts of N sequences have come, and what ends them."""

    prompts: Prompts
    stops: Stops
    bounds: Bounds
    result: Generation

    @property
    def is_running(self) -> jax.Array:
        """Which of them have not ended, bool[N]."""
        return self.result.reasons == FinishReason.RUNNING


def find_first(
    shape: Sequence[int], causes: list[tuple[FinishReason, jax.Array]]
) -> jax.Array:
    """Return the first cause that applies, RUNNING where none does, i32[K]."""
    reasons = jnp.full(shape, FinishReason.RUNNING, jnp.int32)
    for reason, applies in reversed(causes):
        reasons = jnp.where(applies, jnp.int32(reason), reasons)
    return reasons


def judge_prompts(
    prompts: Prompts,
    bounds: Bounds,
    vocabulary: int,
    steering: Steering | None = None,
) -> jax.Array:
    """Return why prompts are not begun, RUNNING where they are, i32[Q].

    Outside of jit, where the tokens are known, a malformed prompt raises UsageError.
    """
    steered: list[tuple[FinishReason, jax.Array]] = []
    if prompts.variants is not None and steering is not None:
        unknown = find_unknown(prompts.variants, steering)
        steered = [(FinishReason.UNKNOWN_VARIANT, unknown)]
    return find_first(
        prompts.lengths.shape,
        [
            (FinishReason.MALFORMED_PROMPT, find_malformed(prompts, vocabulary)),
            (FinishReason.EMPTY_PROMPT, prompts.lengths == 0),
            *steered,
            (FinishReason.LENGTH, prompts.limits <= 0),
            *bounds.exceeded(prompts.lengths),
        ],
    )


def judge_texts(
    progress: Progress,
    tokens: jax.Array,  # i32[N, G], new ones
    sequences: jax.Array,  # i32[K]
    lengths: jax.Array,  # i32[K], new tokens up to and with the one in question
    # bool[K], those that what steers them has ended with it
    has_ended: jax.Array | None,
) -> jax.Array:
    """Return why texts end after a token, RUNNING where they go on, i32[K]."""
    prompts = progress.prompts
    num_samples = tokens.shape[0] // prompts.lengths.shape[0]
    prompt = jax.lax.div(sequences, jnp.int32(num_samples))
    newest = gather(tokens, (sequences, jnp.maximum(lengths - 1, 0)))
    stops = progress.stops.of_prompts(prompt)
    is_stop = jnp.any(newest[:, None] == stops.tokens, axis=1)
    if stops.sequences is not None:
        is_stop |= _ends_with_any(tokens, sequences, lengths, stops.sequences)
    if has_ended is not None:
        is_stop |= has_ended
    return find_first(
        lengths.shape,
        [
            (FinishReason.STOP, is_stop),
            (FinishReason.LENGTH, lengths >= gather(prompts.limits, prompt)),
            *progress.bounds.exceeded(gather(prompts.lengths, prompt) + lengths),
        ],
    )


def _ends_with_any(
    tokens: jax.Array, sequences: jax.Array, lengths: jax.Array, stops: jax.Array
) -> jax.Array:
    """Return which texts, i32[K], end with one of i32[K or 1, F, C], bool[K]."""
    width = stops.shape[2]
    offset = jnp.arange(width, dtype=jnp.int32)[None]
    column = lengths[:, None] - width + offset
    last = gather(tokens, (sequences[:, None], jnp.maximum(column, 0)))
    last = jnp.where(column < 0, _NO_TOKEN, last)
    agrees = (stops == ANY) | (stops == last[:, None])
    is_stop = jnp.all(agrees, axis=2) & jnp.any(stops != ANY, axis=2)
    return jnp.any(is_stop, axis=1)
