"""Results of a generation or a beam search: tokens, finish reasons, statistics.

Symbols: N sequences, B prompts of a search, G most new tokens of a sequence.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np


class FinishReason(enum.IntEnum):
    """The reason for the end of a sequence.

    Example:
      >>> from jkv.decoding import FinishReason
      >>> FinishReason(2).name
      'LENGTH'
    """

    RUNNING = 0  # unfinished: running or waiting
    STOP = 1  # a stop token, a stop sequence or the logits processor
    LENGTH = 2  # the limit of new tokens
    CONTEXT_FULL = 3  # the next token, or the prompt, exceeds `max_context_length`
    OUT_OF_BLOCKS = 4  # it would not fit into the pool alone
    OUT_OF_SEQUENCES = 5  # no cache row was free: it never started
    EMPTY_PROMPT = 6  # nothing to continue: it never started
    CANCELLED = 7  # cancelled, or its row was freed outside of the loop
    NAN_LOGITS = 8  # the logits of its next token had NaN
    DEADLINE = 9  # its deadline passed (`jkv.serving`)
    FAILED = 10  # an exception in the loop that computed it (`jkv.serving`)
    MALFORMED_PROMPT = 11  # invalid token ids, or padding between them
    NOTHING_ALLOWED = 12  # the logits processor masked every token
    UNKNOWN_VARIANT = 13  # the logits processor has no such variant: it never started
    SPAN_TOO_LONG = 14  # no step has the rows of a span (`Prompts`): it never started


class Count:
    """One of the counts of `Statistics`, i32[]."""

    def __init__(self, index: int):
        self.index = index

    def __get__(self, statistics: Any, _: object) -> jax.Array:
        """Return the count; the class has the index."""
        return self if statistics is None else statistics.counts[..., self.index]  # type: ignore[return-value]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts of a generation's work and memory, i32[] each."""

    counts: jax.Array  # i32[13], all of them: one addition a step

    num_steps = Count(0)  # calls of the model
    sequence_steps = Count(1)  # sum of the sequences with a row over steps
    prompt_tokens = Count(2)  # prompt positions computed, repeated ones too
    recomputed_tokens = Count(3)  # generated tokens recomputed
    cached_tokens = Count(4)  # prefix cache hits
    preemptions = Count(5)  # running sequences preempted
    # Most blocks in use, by other sequences too; all layer groups together.
    peak_blocks = Count(6)
    empty_slots = Count(7)  # slots without a token at the peak
    queue_steps = Count(8)  # steps in which a sequence waited for a place
    idle_places = Count(9)  # sum of the places without a row over these steps
    draft_tokens = Count(10)  # draft tokens verified
    accepted_tokens = Count(11)  # draft tokens accepted
    checking_steps = Count(12)  # steps that verified draft tokens

    @classmethod
    def zeros(cls) -> "Statistics":
        """Return zeros."""
        return cls(jnp.zeros((len(COUNTS),), jnp.int32))

    def added(self, numbers: dict[str, jax.Array]) -> "Statistics":
        """Add to some counts by name, i32[] each."""
        index, counts = np.arange(len(COUNTS)), self.counts
        for name, number in numbers.items():
            counts = counts + jnp.where(index == COUNTS[name], number, 0)
        return Statistics(counts)

    def to_host(self) -> dict[str, int]:
        """Return the counts by name."""
        return dict(zip(COUNTS, np.asarray(self.counts).tolist(), strict=True))

    def internal_fragmentation(self, block_size: int) -> float:
        """Return the share of slots in use at the peak without a token (host).

        Args:
          block_size: slots per block, T.
        """
        slots = int(self.peak_blocks) * block_size
        return int(self.empty_slots) / slots if slots else 0.0


# Indices of the counts, by name.
COUNTS: dict[str, int] = {
    name: count.index
    for name, count in vars(Statistics).items()
    if isinstance(count, Count)
}


class Generation(NamedTuple):
    """New tokens of N sequences."""

    tokens: jax.Array  # i32[N, G], stop tokens included, -1 past the end
    lengths: jax.Array  # i32[N], new tokens of each sequence
    reasons: jax.Array  # i32[N], `FinishReason`
    logprobs: jax.Array  # f32[N, G], under the model's logits, 0 past the end
    statistics: Statistics  # counts of work and memory
    # State of the logits processor, arrays [N, ...], after each sequence's last token.
    processor_state: Any = None
    # i32[N], prompt tokens found in the prefix index; 0 for a sequence that shares the
    # prompt of another.
    cached_tokens: Any = None

    @property
    def status(self) -> NoReturn:
        """Not available: sequences finish with `reasons`, they are not refused."""
        raise AttributeError(
            "a Generation has no status; use reasons, i32[N], such as "
            "jkv.FinishReason(int(result.reasons[0])).name"
        )

    def add_counts(self, **counts: jax.Array) -> "Generation":
        """Add to statistics by name, i32[] each."""
        return self._replace(statistics=self.statistics.added(counts))

    def map_sequences(
        self, change: Callable[..., jax.Array], *others: "Generation"
    ) -> "Generation":
        """Map a function over the arrays [N, ...]; keep the statistics."""
        without: Any = None
        arrays = (each._replace(statistics=without) for each in (self, *others))
        changed: Generation = jax.tree.map(change, *arrays)
        return changed._replace(statistics=self.statistics)

    @classmethod
    def empty(
        cls, reasons: jax.Array, max_new_tokens: int, processor_state: Any = None
    ) -> "Generation":
        """Return results without tokens, for sequences with these reasons, i32[N]."""
        shape = reasons.shape[0], max_new_tokens
        return cls(
            tokens=jnp.full(shape, -1, jnp.int32),
            lengths=jnp.zeros(reasons.shape, jnp.int32),
            reasons=reasons,
            logprobs=jnp.zeros(shape, jnp.float32),
            statistics=Statistics.zeros(),
            processor_state=processor_state,
            cached_tokens=jnp.zeros(reasons.shape, jnp.int32),
        )


class BeamStatistics(NamedTuple):
    """Counts of a beam search's work and memory."""

    num_steps: jax.Array  # i32[], calls of the model
    prompt_tokens: jax.Array  # i32[], prompt positions computed, repeated ones too
    cached_tokens: jax.Array  # i32[], prefix cache hits
    forked_beams: jax.Array  # i32[], beams that continue another beam
    restarts: jax.Array  # i32[], searches that were preempted and started over
    peak_blocks: jax.Array  # i32[], most blocks in use, by other sequences too
    # i32[], the same without sharing between beams
    unshared_peak_blocks: jax.Array

    @classmethod
    def zeros(cls) -> "BeamStatistics":
        """Return zeros, with an array of its own for each count."""
        return cls(*[jnp.zeros((), jnp.int32) for _ in cls._fields])

    def add(self, **counts: jax.Array) -> "BeamStatistics":
        """Add to counts by name, i32[] each."""
        old = self._asdict()
        return self._replace(**{name: old[name] + n for name, n in counts.items()})


class BeamSearch(NamedTuple):
    """The best completions of a beam search, best first."""

    tokens: jax.Array  # i32[B, num_return, G], stop tokens included, -1 past the end
    lengths: jax.Array  # i32[B, num_return], new tokens of each
    scores: jax.Array  # f32[B, num_return], -inf without a completion
    reasons: jax.Array  # i32[B], `FinishReason` of each prompt's search
    statistics: BeamStatistics  # counts of work and memory
