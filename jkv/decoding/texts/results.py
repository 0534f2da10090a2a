"""What a generation or a beam search has produced, what it took, and why texts ended.

Symbols: N sequences, B prompts of a search, G most new tokens of a sequence.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp


class FinishReason(enum.IntEnum):
    """Why a sequence of a generation ended.

    Example:
      >>> from jkv.decoding import FinishReason
      >>> FinishReason(2).name
      'LENGTH'
    """

    RUNNING = 0  # it has not ended: it runs or waits
    STOP = 1  # its new tokens end with a stop token or a stop sequence
    LENGTH = 2  # it has as many new tokens as it may have
    CONTEXT_FULL = 3  # its next token, or its prompt, is past `max_context_length`
    OUT_OF_BLOCKS = 4  # it would not fit into the pool if it were alone
    OUT_OF_SEQUENCES = 5  # the cache had no row for it: it never began
    EMPTY_PROMPT = 6  # there was nothing to continue: it never began
    CANCELLED = 7  # it was cancelled, or its row was freed outside of the loop
    NAN_LOGITS = 8  # the model's logits for its next token were not numbers
    DEADLINE = 9  # its time was over (`jkv.serving`)
    FAILED = 10  # an exception in the loop that computed it (`jkv.serving`)
    MALFORMED_PROMPT = 11  # its prompt had no token ids, or padding between them
    NOTHING_ALLOWED = 12  # what steers it allowed no token
    UNKNOWN_VARIANT = 13  # what steers it has no such variant: it never began


class Statistics(NamedTuple):
    """What a generation did and needed."""

    num_steps: jax.Array  # i32[], calls of the model
    sequence_steps: jax.Array  # i32[], sum over these of the sequences with a row
    prompt_tokens: jax.Array  # i32[], prompt positions computed, again ones too
    recomputed_tokens: jax.Array  # i32[], generated ones computed a second time
    cached_tokens: jax.Array  # i32[], tokens that the prefix cache had
    preemptions: jax.Array  # i32[], running sequences that gave their blocks back
    # i32[], most blocks in use, others' too; of all groups of layers together
    peak_blocks: jax.Array
    empty_slots: jax.Array  # i32[], slots without a token in the step's blocks, then
    queue_steps: jax.Array  # i32[], steps in which a sequence waited for a place
    idle_places: jax.Array  # i32[], sum over these of the places without a row
    draft_tokens: jax.Array  # i32[], tokens that were guessed and computed
    accepted_tokens: jax.Array  # i32[], those of them that were right
    checking_steps: jax.Array  # i32[], steps that computed guesses

    @classmethod
    def zeros(cls) -> "Statistics":
        """Return the statistics of nothing, an array of its own for each."""
        return cls(*[jnp.zeros((), jnp.int32) for _ in cls._fields])

    def internal_fragmentation(self, block_size: int) -> float:
        """Return the share of the slots in use at the peak that held no token (host).

        Args:
          block_size: slots per block, T.
        """
        slots = int(self.peak_blocks) * block_size
        return int(self.empty_slots) / slots if slots else 0.0


class Generation(NamedTuple):
    """The new tokens of N sequences."""

    tokens: jax.Array  # i32[N, G], what stopped them included, -1 past the end
    lengths: jax.Array  # i32[N], new tokens of each sequence
    reasons: jax.Array  # i32[N], `FinishReason`
    logprobs: jax.Array  # f32[N, G], of each token under the model, 0 past the end
    statistics: Statistics  # what it took to make them
    # Of what steers them, a pytree of arrays [N, ...]: after each one's last token.
    steering_state: Any = None
    # i32[N], tokens of each one's prompt that the prefix index had; 0 if it shares the
    # prompt of another sequence.
    cached_tokens: Any = None

    @property
    def status(self) -> NoReturn:
        """Not there, as a text is never refused: `reasons` says why it ended."""
        raise AttributeError(
            "a Generation has no status: reasons, i32[N], says why sequences ended, as "
            "in jkv.FinishReason(int(result.reasons[0])).name"
        )

    def add_counts(self, **counts: jax.Array) -> "Generation":
        """Return the same with more counted, i32[] each, by their names."""
        old = self.statistics._asdict()
        new = {name: old[name] + count for name, count in counts.items()}
        return self._replace(statistics=self.statistics._replace(**new))

    def map_sequences(
        self, change: Callable[..., jax.Array], *others: "Generation"
    ) -> "Generation":
        """Return what a function makes of each array [N, ...]; counts stay."""
        without: Any = None
        arrays = (each._replace(statistics=without) for each in (self, *others))
        changed: Generation = jax.tree.map(change, *arrays)
        return changed._replace(statistics=self.statistics)

    @classmethod
    def empty(
        cls, reasons: jax.Array, max_new_tokens: int, steering_state: Any = None
    ) -> "Generation":
        """Return what there is before the first step, of sequences i32[N]."""
        shape = reasons.shape[0], max_new_tokens
        return cls(
            tokens=jnp.full(shape, -1, jnp.int32),
            lengths=jnp.zeros(reasons.shape, jnp.int32),
            reasons=reasons,
            logprobs=jnp.zeros(shape, jnp.float32),
            statistics=Statistics.zeros(),
            steering_state=steering_state,
            cached_tokens=jnp.zeros(reasons.shape, jnp.int32),
        )


class BeamStatistics(NamedTuple):
    """What a beam search did and needed."""

    num_steps: jax.Array  # i32[], calls of the model
    prompt_tokens: jax.Array  # i32[], prompt positions computed, again ones too
    cached_tokens: jax.Array  # i32[], tokens that the prefix cache had
    forked_beams: jax.Array  # i32[], beams that went on from another one's past
    restarts: jax.Array  # i32[], searches that gave their blocks back and began anew
    peak_blocks: jax.Array  # i32[], most blocks in use, others' too
    # i32[], the same if each beam had all of its blocks for itself
    unshared_peak_blocks: jax.Array

    @classmethod
    def zeros(cls) -> "BeamStatistics":
        """Return the statistics of nothing, an array of its own for each."""
        return cls(*[jnp.zeros((), jnp.int32) for _ in cls._fields])

    def add(self, **counts: jax.Array) -> "BeamStatistics":
        """Return the same with more counted, i32[] each, by their names."""
        old = self._asdict()
        return self._replace(**{name: old[name] + n for name, n in counts.items()})


class BeamSearch(NamedTuple):
    """The best texts that a beam search found, best first."""

    tokens: jax.Array  # i32[B, num_return, G], stop tokens included, -1 past the end
    lengths: jax.Array  # i32[B, num_return], new tokens of each
    scores: jax.Array  # f32[B, num_return], -inf where there is no text
    reasons: jax.Array  # i32[B], `FinishReason`: why each prompt's search ended
    statistics: BeamStatistics  # what it took
