"""DraftStep: inputs of a drafter, and the choice of its draft tokens.

The loop owns sampling, logits processors, and the distribution that a draft token is
drawn from, which verification needs. A drafter passes logits to `choose` and gets
tokens.

Symbols: W places, K draft tokens of each, V vocabulary size, A width of the hidden
states.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.decoding.sampling.draws import Choice, by_row, draw, filter_logits
from jkv.decoding.sampling.next_token import is_nothing_left, sampling_of
from jkv.decoding.scheduler.state import ActiveSequences, GenerationState
from jkv.decoding.sequences.prompts import find_sequences
from jkv.decoding.speculation.draft_tokens import DraftTokens
from jkv.masks import Mask
from jkv.operations import fori_loop, gather
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.status import UsageError
from jkv.verbs.masking import peek, with_mask

# Streams of random numbers beside plain draws.
DRAFT, ACCEPT, REPLACE = 1, 2, 3

Carry = TypeVar("Carry")


class Chosen(NamedTuple):
    """Draft tokens chosen so far, and their distributions."""

    tokens: jax.Array  # i32[W, K]
    counts: jax.Array  # i32[W]
    logits: jax.Array  # f32[W, K, V], filtered logits each token was drawn from
    processor_state: Any  # after the tokens; None without a logits processor


class DraftStep:
    """A step to draft for: W places, at most K draft tokens of each.

    Attributes:
      newest: i32[W], the newest token of each sequence, which is not in the cache.
      counts: i32[W], most draft tokens of each, 0 for places to skip.
      previous: f32[W, A], auxiliary hidden states of the newest cached token.
      num_tokens: K.
    """

    def __init__(
        self,
        cache: Cache,  # before the step
        state: GenerationState,
        active: ActiveSequences,
        choice: Choice,  # of N sequences
        counts: jax.Array,  # i32[W]
        num_tokens: int,
        previous: jax.Array,  # f32[W, A]
        batch: Batch | None,  # None for a drafter without groups
    ) -> None:
        self.newest, self.counts = state.newest(active), counts
        self.previous, self.num_tokens = previous, num_tokens
        self._cache, self._state, self._batch = cache, state, batch
        places, made = state.places, state.result.lengths
        self._sampling = sampling_of(choice.sampling, made.shape[0], places.sequences)
        self._seeds = by_row(self._sampling, places.num_places).seeds
        self._made = gather(made, places.sequences)
        # Apply the logits processor while drafting, to avoid rejections.
        self._processor = state.rows_of(choice.logits_processor)
        self._chosen: Chosen | None = None
        self._num_chosen = 0

    @property
    def batch(self) -> Batch:
        """The step's rows, 1 + counts of each place, planned before drafting.

        `batch.row(j)` is row j of each alone. The target verifies the same rows.

        Raises:
          UsageError: for a drafter without groups.
        """
        if self._batch is None:
            raise UsageError(
                "groups is (), and a drafter without layers has no rows to write; "
                "attend to the target's cache with step.past"
            )
        return self._batch

    @property
    def past(self) -> Batch:
        """One row of each place that only attends to its cached tokens (`jkv.peek`)."""
        is_ready = self.counts > 0
        seq_ids = jnp.where(is_ready, self._state.places.seq_ids, NO_SEQUENCE)
        return peek(self._cache, seq_ids)

    def with_mask(self, mask: Mask, *, max_span: int | None = None) -> Batch:
        """Return `batch` under another mask; arguments as for `jkv.with_mask`."""
        return with_mask(self.batch, mask, max_span=max_span)

    def tokens(self) -> tuple[jax.Array, jax.Array]:
        """Return prompts and completions so far, i32[W, L], and lengths, i32[W]."""
        state = self._state
        return find_sequences(state.prompts, state.result, state.places.sequences)

    def choose(self, index: int, logits: jax.Array) -> jax.Array:
        """Choose draft tokens from logits, as the loop chooses tokens.

        Args:
          index: the number of the draft token, from 0, each once and in order.
          logits: f32[W, V].

        Returns:
          i32[W], the tokens.

        Raises:
          UsageError: for another index, or logits of another vocabulary.
        """
        if index != self._num_chosen or index >= self.num_tokens:
            raise UsageError(
                f"index must be {self._num_chosen}, each of {self.num_tokens} draft "
                f"tokens once and in order, got {index}"
            )
        chosen = self._begin() if self._chosen is None else self._chosen
        self._num_chosen += 1
        self._chosen, tokens = self._choose(chosen, jnp.int32(index), logits)
        return tokens

    def decode(
        self,
        compute: Callable[[Carry, jax.Array, jax.Array], tuple[Carry, jax.Array]],
        carry: Carry,
    ) -> Carry:
        """Choose all draft tokens one by one, in a loop that is compiled once.

        Args:
          compute: returns the carry and logits, f32[W, V], given the carry, the number
            of the draft token, i32[], and the tokens before it, i32[W].
          carry: any pytree, such as the cache.

        Returns:
          The carry. The tokens are in `drafted`.
        """
        if self._num_chosen:
            raise UsageError("decode chooses all draft tokens, after none by choose")
        self._num_chosen = self.num_tokens

        def trip(
            index: jax.Array, loop: tuple[Carry, Chosen, jax.Array]
        ) -> tuple[Carry, Chosen, jax.Array]:
            carry, chosen, tokens = loop
            carry, logits = compute(carry, index, tokens)
            return carry, *self._choose(chosen, index, logits)

        end = jnp.clip(jnp.max(self.counts), 0, self.num_tokens)
        start = carry, self._begin(), self.newest
        carry, self._chosen, _ = fori_loop(jnp.int32(0), end, trip, start)
        return carry

    @property
    def drafted(self) -> tuple[jax.Array, jax.Array]:
        """The chosen tokens, i32[W, K], and their counts, i32[W]."""
        if self._chosen is None:
            raise UsageError("no draft token was chosen; call choose or decode first")
        return self._chosen.tokens, self._chosen.counts

    def finish(
        self, tokens: jax.Array, counts: jax.Array
    ) -> tuple[DraftTokens, jax.Array | None]:
        """Check a drafter's results, and return them with their logits, if any."""
        sizes, most = {"B": self.newest.shape[0], "k": self.num_tokens}, self.counts
        why = "one row for each sequence of the step, one entry for each draft token"
        expect("draft tokens", tokens, "B k", sizes, jnp.integer, why=why)
        expect("counts of draft tokens", counts, "B", sizes, jnp.integer, why=why)
        logits, counts = None, jnp.clip(counts.astype(jnp.int32), 0, most)
        if self._chosen is not None:
            # The tokens must be the ones that were drawn.
            tokens, logits = self._chosen.tokens, self._chosen.logits
            counts = jnp.minimum(counts, self._chosen.counts)
        tokens = tokens.astype(jnp.int32)
        is_known = (tokens >= 0) & (tokens < self._state.seen.shape[1])
        leading = jnp.cumprod(is_known.astype(jnp.int32), axis=1)
        counts = jnp.minimum(counts, jnp.sum(leading, axis=1, dtype=jnp.int32))
        drafted = DraftTokens(jnp.where(is_known, tokens, 0), counts, counts * 0)
        return drafted, logits

    def _begin(self) -> Chosen:
        num_places, vocabulary = self._state.seen.shape
        shape, processor = (num_places, self.num_tokens), self._processor
        return Chosen(
            tokens=jnp.zeros(shape, jnp.int32),
            counts=jnp.zeros((num_places,), jnp.int32),
            logits=jnp.zeros((*shape, vocabulary), jnp.float32),
            processor_state=None if processor is None else processor.state,
        )

    def _choose(
        self, chosen: Chosen, index: jax.Array, logits: jax.Array
    ) -> tuple[Chosen, jax.Array]:
        """Choose one token of each place, i32[W]."""
        num_places, vocabulary = self._state.seen.shape
        if logits.shape != (num_places, vocabulary):
            raise UsageError(
                f"the draft model must have the model's vocabulary of {vocabulary} "
                f"tokens, got logits for {logits.shape[-1]}, of shape "
                f"{list(logits.shape)} for {num_places} sequences"
            )
        logits = logits.astype(jnp.float32)
        is_drafted = (index < self.counts) & (chosen.counts == index)
        processor, state = self._processor, chosen.processor_state
        if processor is not None:
            processor = processor._replace(state=state)
            logits = processor.process(logits)
            is_drafted &= ~is_nothing_left(logits)
        filtered = filter_logits(logits, self._sampling)
        # Keys of a step without the drafter may be arbitrary: nothing is drafted then.
        is_drafted &= ~jnp.any(jnp.isnan(filtered), axis=-1)
        drawn = draw(filtered, self._seeds, self._made + index, DRAFT)
        if processor is not None:
            state = processor.advance(jnp.where(is_drafted, drawn, -1)).state
        put = Chosen(
            tokens=chosen.tokens.at[:, index].set(drawn),
            counts=chosen.counts + is_drafted.astype(jnp.int32),
            logits=chosen.logits.at[:, index].set(filtered),
            processor_state=state,
        )
        return put, drawn
