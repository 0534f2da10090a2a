"""DraftStep: inputs of a drafter, and the choice of its draft tokens.

The loop owns sampling, logits processors, and the distribution that a draft token is
drawn from, which verification needs. A drafter passes logits to `choose` and gets
tokens. Every drawn token must be verified, or its distribution would change; a drafter
stops before a draw, with `choose(keep=)`.

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

    def choose(
        self, index: int, logits: jax.Array, keep: jax.Array | None = None
    ) -> jax.Array:
        """Choose draft tokens from logits, as the loop chooses tokens.

        Args:
          index: the number of the draft token, from 0, each once and in order.
          logits: f32[W, V].
          keep: bool[W], False ends the draft tokens of a sequence before this one, for
            example by the confidence of `logits`. None keeps all.

        Returns:
          i32[W], the tokens.

        Raises:
          UsageError: for another index, or logits of another vocabulary.
        """
        if self._num_chosen >= self.num_tokens:
            raise UsageError(
                f"all {self.num_tokens} draft tokens were chosen; call choose at most "
                f"num_tokens={self.num_tokens} times, got index {index}"
            )
        if index != self._num_chosen:
            raise UsageError(
                f"index must be {self._num_chosen}, the number of draft tokens chosen "
                f"so far, got {index}; choose each once and in order"
            )
        chosen = self._begin() if self._chosen is None else self._chosen
        if keep is not None:
            sizes, why = {"B": self.newest.shape[0]}, "an entry for each sequence"
            expect("keep", keep, "B", sizes, jnp.bool_, why=why)
        self._num_chosen += 1
        self._chosen, tokens = self._choose(chosen, jnp.int32(index), logits, keep)
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
        """Check a drafter's results, and return them with their logits, if any.

        Tokens and counts of `choose` and `decode` stand, whatever the drafter returns:
        counts may depend on the tokens drawn, and would change their distribution.
        """
        sizes, most = {"B": self.newest.shape[0], "k": self.num_tokens}, self.counts
        why = "one row for each sequence of the step, one entry for each draft token"
        expect("draft tokens", tokens, "B k", sizes, jnp.integer, why=why)
        expect("counts of draft tokens", counts, "B", sizes, jnp.integer, why=why)
        logits, counts = None, jnp.clip(counts.astype(jnp.int32), 0, most)
        if self._chosen is not None:
            tokens, counts, logits, _ = self._chosen
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
        self,
        chosen: Chosen,
        index: jax.Array,
        logits: jax.Array,
        keep: jax.Array | None = None,
    ) -> tuple[Chosen, jax.Array]:
        """Choose one token of each place, i32[W]."""
        num_places, vocabulary = self._state.seen.shape
        why = "a row for each sequence"
        expect("draft logits", logits, "B V", {"B": num_places}, jnp.floating, why=why)
        if logits.shape[1] != vocabulary:
            raise UsageError(
                f"the draft model must have the model's vocabulary of {vocabulary} "
                f"tokens, got logits for {logits.shape[1]}"
            )
        logits = jnp.asarray(logits, jnp.float32)
        is_drafted = (index < self.counts) & (chosen.counts == index)
        if keep is not None:
            is_drafted &= keep
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
