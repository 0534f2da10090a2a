"""Rules of beam search: running beams, finished hypotheses, and when to stop.

They follow Hugging Face transformers (`generate(num_beams=...)`, version 5), with equal
completions and scores. The score of a finished hypothesis is the sum of its
log-probabilities divided by its number of new tokens to the power of the length
penalty. Among the candidates of a step, beams with one more token each, the K best may
finish, and the K best that do not finish keep running. C is large enough that K
candidates do not finish, for any stop tokens.

Symbols: Q prompts, K beams of each, C candidates of each, G most new tokens, V
vocabulary size.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

EarlyStopping = bool | Literal["never"]

# Score of a missing beam or hypothesis.
NO_SCORE = float("-inf")


class Rules(NamedTuple):
    """Options of a search."""

    num_beams: int  # K
    max_new_tokens: int  # G
    stop_tokens: jax.Array  # i32[E]
    length_penalty: jax.Array  # f32[]
    early_stopping: EarlyStopping
    num_end_tokens: int = 0  # further end tokens, of the logits processor

    @property
    def num_candidates(self) -> int:
        """The number of candidates of each prompt, C; K or more do not finish."""
        num_ends = self.stop_tokens.shape[0] + self.num_end_tokens
        return max(2, 1 + num_ends) * self.num_beams

    def penalise(self, scores: jax.Array, lengths: jax.Array | int) -> jax.Array:
        """Apply the length penalty to sums of log-probabilities, f32[...]."""
        return scores / jnp.power(
            jnp.asarray(lengths, jnp.float32), self.length_penalty
        )


class Beams(NamedTuple):
    """Running beams, best first."""

    tokens: jax.Array  # i32[Q, K, G], -1 past the end
    scores: jax.Array  # f32[Q, K], sums of log-probabilities, -inf for missing beams

    @classmethod
    def fresh(cls, num_prompts: int, num_beams: int, max_new_tokens: int) -> "Beams":
        """Return one empty beam for each prompt, as equal beams would stay equal."""
        scores = jnp.full((num_prompts, num_beams), NO_SCORE, jnp.float32)
        return cls(
            tokens=jnp.full((num_prompts, num_beams, max_new_tokens), -1, jnp.int32),
            scores=scores.at[:, 0].set(0.0),
        )

    def choose(self, candidates: "Continuations", length: jax.Array) -> "Beams":
        """Return beams from the K running candidates, with `length` tokens."""
        return Beams(
            tokens=self.sequences_of(candidates, length), scores=candidates.scores
        )

    def sequences_of(self, candidates: "Continuations", length: jax.Array) -> jax.Array:
        """Return the completions of candidates, i32[Q, C, G], with `length` tokens."""
        sequences = jnp.take_along_axis(
            self.tokens, candidates.parents[:, :, None], axis=1
        )
        return sequences.at[:, :, length - 1].set(candidates.tokens)


class Continuations(NamedTuple):
    """Beams with one more token, best first."""

    parents: jax.Array  # i32[Q, C], index of the beam
    tokens: jax.Array  # i32[Q, C], the new token
    scores: jax.Array  # f32[Q, C], sums of log-probabilities


class Hypotheses(NamedTuple):
    """The best finished completions, best first."""

    tokens: jax.Array  # i32[Q, K, G], -1 past the end
    lengths: jax.Array  # i32[Q, K]
    scores: jax.Array  # f32[Q, K], after the length penalty, -inf for missing ones

    @classmethod
    def none(
        cls, num_prompts: int, num_beams: int, max_new_tokens: int
    ) -> "Hypotheses":
        shape = num_prompts, num_beams
        return cls(
            tokens=jnp.full((*shape, max_new_tokens), -1, jnp.int32),
            lengths=jnp.zeros(shape, jnp.int32),
            scores=jnp.full(shape, NO_SCORE, jnp.float32),
        )

    @property
    def is_full(self) -> jax.Array:
        """True for prompts with K finished hypotheses, bool[Q]."""
        return jnp.all(self.scores > NO_SCORE, axis=1)

    def add(
        self, sequences: jax.Array, scores: jax.Array, length: jax.Array
    ) -> "Hypotheses":
        """Keep the K best of these and new ones of `length` tokens each."""
        lengths = jnp.where(scores > NO_SCORE, length, 0)
        sequences = jnp.where((scores > NO_SCORE)[:, :, None], sequences, -1)
        kept, best = lax.top_k(
            jnp.concatenate([self.scores, scores], axis=1), self.scores.shape[1]
        )
        tokens = jnp.concatenate([self.tokens, sequences], axis=1)
        return Hypotheses(
            tokens=jnp.take_along_axis(tokens, best[:, :, None], axis=1),
            lengths=jnp.take_along_axis(
                jnp.concatenate([self.lengths, lengths], axis=1), best, axis=1
            ),
            scores=kept,
        )


def rank_continuations(
    logprobs: jax.Array,  # f32[Q, K, V]
    scores: jax.Array,  # f32[Q, K]
    num_candidates: int,
) -> Continuations:
    """Return the best continuations of each prompt's beams, all if V is small."""
    num_prompts, num_beams, vocabulary = logprobs.shape
    total = (logprobs + scores[:, :, None]).reshape(num_prompts, -1)
    # The best overall are among the best of each beam.
    each, tokens = lax.top_k(
        total.reshape(num_prompts * num_beams, vocabulary),
        min(num_candidates, vocabulary),
    )
    width = each.shape[1]
    best, places = lax.top_k(
        each.reshape(num_prompts, -1), min(num_candidates, num_beams * width)
    )
    return Continuations(
        parents=lax.div(places, jnp.int32(width)),
        tokens=jnp.take_along_axis(tokens.reshape(num_prompts, -1), places, axis=1),
        scores=best,
    )


def choose_running(
    candidates: Continuations, is_final: jax.Array, num_beams: int
) -> Continuations:
    """Return the K best candidates that do not finish; `is_final` is bool[Q, C]."""
    scores = jnp.where(is_final, NO_SCORE, candidates.scores)
    scores = _widened(scores, num_beams, NO_SCORE)
    best, places = lax.top_k(scores, num_beams)

    def pick(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(_widened(values, num_beams, 0), places, axis=1)

    return Continuations(pick(candidates.parents), pick(candidates.tokens), best)


def keep_ended(
    hypotheses: Hypotheses,
    beams: Beams,
    candidates: Continuations,
    is_final: jax.Array,  # bool[Q, C]
    length: jax.Array,  # i32[]
    rules: Rules,
) -> Hypotheses:
    """Add finishing candidates that are among the K best of the step."""
    rank = jnp.arange(is_final.shape[1], dtype=jnp.int32)[None]
    ends = is_final & (rank < rules.num_beams)
    scores = jnp.where(
        ends, rules.penalise(candidates.scores, length), jnp.float32(NO_SCORE)
    )
    return hypotheses.add(beams.sequences_of(candidates, length), scores, length)


def may_improve(
    hypotheses: Hypotheses,  # finished
    best: jax.Array,  # f32[Q], the best sum of log-probabilities of the running beams
    length: jax.Array,  # i32[], new tokens of each
    rules: Rules,
) -> jax.Array:
    """Return True if running beams may still beat finished hypotheses, bool[Q].

    The best beam is scored at its current length; with `early_stopping="never"` and a
    penalty above 0, which favours long completions, at the greatest length. This is an
    upper bound only if the sum of log-probabilities does not increase with length.
    """
    if rules.early_stopping == "never":
        favours_long = rules.length_penalty > 0
        length = jnp.where(favours_long, jnp.int32(rules.max_new_tokens), length)
    worst = jnp.min(hypotheses.scores, axis=1)
    improves = rules.penalise(best, length) > worst
    if rules.early_stopping is True:
        improves &= ~hypotheses.is_full
    return improves


def _widened(values: jax.Array, width: int, fill: float) -> jax.Array:
    """Pad values to at least `width` columns."""
    missing = max(0, width - values.shape[1])
    return jnp.pad(values, ((0, 0), (0, missing)), constant_values=fill)
