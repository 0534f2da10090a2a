"""What a generation has produced so far, and why each of its sequences ended.

Symbols: B sequences, G most new tokens of a sequence, V tokens in the vocabulary, E
stop tokens.
"""

import dataclasses
import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp


class FinishReason(enum.IntEnum):
    """Why a sequence of a generation ended.

    Example:
      >>> from jkv.decoding import FinishReason
      >>> FinishReason(2).name
      'LENGTH'
    """

    RUNNING = 0  # it has not ended
    STOP = 1  # its last token is a stop token
    LENGTH = 2  # it has as many new tokens as it may have
    CONTEXT_FULL = 3  # its next token, or its prompt, is past `max_context_length`
    OUT_OF_BLOCKS = 4  # the pool had no block for it, and no other sequence could go on
    OUT_OF_SEQUENCES = 5  # the cache had no row for it: it never began
    EMPTY_PROMPT = 6  # there was nothing to continue: it never began
    CANCELLED = 7  # its row was freed by somebody else between two steps


class Statistics(NamedTuple):
    """What a generation did and needed."""

    num_steps: jax.Array  # i32[], calls of the model
    peak_blocks: jax.Array  # i32[], most blocks of the pool in use at one time
    empty_slots: jax.Array  # i32[], slots without a token in its own blocks, then
    cached_tokens: jax.Array  # i32[], prompt tokens that the prefix cache had

    def internal_fragmentation(self, block_size: int) -> float:
        """Return the share of the slots in use at the peak that held no token (host).

        Args:
          block_size: slots per block, T.
        """
        slots = int(self.peak_blocks) * block_size
        return int(self.empty_slots) / slots if slots else 0.0


class Generation(NamedTuple):
    """The new tokens of B sequences."""

    tokens: jax.Array  # i32[B, G], the stop token included, -1 past the end
    lengths: jax.Array  # i32[B], new tokens of each sequence
    reasons: jax.Array  # i32[B], `FinishReason`
    logprobs: jax.Array  # f32[B, G], of each token under the model, 0 past the end
    statistics: Statistics  # what it took to make them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GenerationState:
    """A generation under way: what `prefill` returns and `decode` carries on.

    The last token of each running sequence has been chosen but is not in the cache.
    """

    result: Generation  # what there is so far
    seq_ids: jax.Array  # i32[B], rows of the cache, -1 once a sequence has ended
    limits: jax.Array  # i32[B], new tokens each may have, at most G
    stop_tokens: jax.Array  # i32[E]
    seen: jax.Array  # bool[B, V], tokens in the prompt or generated

    @property
    def is_running(self) -> jax.Array:
        """Whether each sequence goes on, bool[B]."""
        return self.seq_ids >= 0

    @property
    def last_tokens(self) -> jax.Array:
        """The newest token of each sequence, i32[B]; 0 where there is none."""
        tokens, lengths = self.result.tokens, self.result.lengths
        last = jnp.maximum(lengths - 1, 0)[:, None]
        newest = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
        return jnp.maximum(newest, 0)
