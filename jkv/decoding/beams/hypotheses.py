"""The rules of beam search: which texts run on, which have ended, when to stop.

They are those of Hugging Face transformers (`generate(num_beams=...)`, version 5), so
that texts and scores are its own. The score of a text that has ended is the sum of its
log-probabilities, divided by its number of new tokens to the power of the length
penalty. Of the candidates of a step, beams with one more token each, the K best may
end; the K best that do not end run on. There are so many candidates that K of them do
not end, whatever the stop tokens.

Symbols: Q prompts, K beams of each, C candidates of each, G most new tokens, V tokens
in the vocabulary.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

EarlyStopping = bool | Literal["never"]

# The score of what is not there.
NO_SCORE = float("-inf")


class Rules(NamedTuple):
    """What the caller says about a search."""

    num_beams: int  # K
    max_new_tokens: int  # G
    stop_tokens: jax.Array  # i32[E]
    length_penalty: jax.Array  # f32[]
    early_stopping: EarlyStopping
    num_end_tokens: int = 0  # more that may end a text, by what steers it

    @property
    def num_candidates(self) -> int:
        """Continuations of which K do not end, C."""
        num_ends = self.stop_tokens.shape[0] + self.num_end_tokens
        return max(2, 1 + num_ends) * self.num_beams

    def penalise(self, scores: jax.Array, lengths: jax.Array | int) -> jax.Array:
        """Divide sums of log-probabilities, f32[...], by what their length costs."""
        return scores / jnp.power(
            jnp.asarray(lengths, jnp.float32), self.length_penalty
        )


class Beams(NamedTuple):
    """Texts that run, best first."""

    tokens: jax.Array  # i32[Q, K, G], -1 past the end
    scores: jax.Array  # f32[Q, K], sums of log-probabilities, -inf where there is none

    @classmethod
    def fresh(cls, num_prompts: int, num_beams: int, max_new_tokens: int) -> "Beams":
        """Return one empty text for each prompt: beams that agree would be one."""
        scores = jnp.full((num_prompts, num_beams), NO_SCORE, jnp.float32)
        return cls(
            tokens=jnp.full((num_prompts, num_beams, max_new_tokens), -1, jnp.int32),
            scores=scores.at[:, 0].set(0.0),
        )

    def choose(self, candidates: "Continuations", length: jax.Array) -> "Beams":
        """Return the K best candidates that have not ended, with `length` tokens."""
        return Beams(tokens=self.texts_of(candidates, length), scores=candidates.scores)

    def texts_of(self, candidates: "Continuations", length: jax.Array) -> jax.Array:
        """Return the texts of candidates, i32[Q, C, G], of so many tokens, i32[]."""
        texts = jnp.take_along_axis(self.tokens, candidates.parents[:, :, None], axis=1)
        return texts.at[:, :, length - 1].set(candidates.tokens)


class Continuations(NamedTuple):
    """Beams with one more token, best first."""

    parents: jax.Array  # i32[Q, C], the beam
    tokens: jax.Array  # i32[Q, C], the token
    scores: jax.Array  # f32[Q, C], sums of log-probabilities


class Hypotheses(NamedTuple):
    """The best texts that have ended, best first."""

    tokens: jax.Array  # i32[Q, K, G], -1 past the end
    lengths: jax.Array  # i32[Q, K]
    scores: jax.Array  # f32[Q, K], after the length penalty, -inf where there is none

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
        """Which prompts have K texts that have ended, bool[Q]."""
        return jnp.all(self.scores > NO_SCORE, axis=1)

    def add(
        self, texts: jax.Array, scores: jax.Array, length: jax.Array
    ) -> "Hypotheses":
        """Return the K best of these and others of `length` tokens each."""
        lengths = jnp.where(scores > NO_SCORE, length, 0)
        texts = jnp.where((scores > NO_SCORE)[:, :, None], texts, -1)
        kept, best = lax.top_k(
            jnp.concatenate([self.scores, scores], axis=1), self.scores.shape[1]
        )
        tokens = jnp.concatenate([self.tokens, texts], axis=1)
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
    """Return the best continuations of each prompt's beams; of a few tokens all."""
    num_prompts, num_beams, vocabulary = logprobs.shape
    total = (logprobs + scores[:, :, None]).reshape(num_prompts, -1)
    # The best of all are among the best of each beam, which are much fewer.
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
    """Return the K best candidates that do not end, bool[Q, C] says which do."""
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
    """Add candidates that end, if they are among the K best of the step."""
    rank = jnp.arange(is_final.shape[1], dtype=jnp.int32)[None]
    ends = is_final & (rank < rules.num_beams)
    scores = jnp.where(
        ends, rules.penalise(candidates.scores, length), jnp.float32(NO_SCORE)
    )
    return hypotheses.add(beams.texts_of(candidates, length), scores, length)


def may_improve(
    hypotheses: Hypotheses,  # those that have ended
    best: jax.Array,  # f32[Q], the best sum of log-probabilities of the beams that run
    length: jax.Array,  # i32[], new tokens of each
    rules: Rules,
) -> jax.Array:
    """Tell whether texts that run may still beat those that have ended, bool[Q].

    The best beam is taken at its present length; with `early_stopping="never"` and a
    penalty above 0, which favours long texts, at the greatest length. That is a guess
    from above only where the sum of log-probabilities cannot grow better with length.
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
    """Return values with at least so many columns."""
    missing = max(0, width - values.shape[1])
    return jnp.pad(values, ((0, 0), (0, missing)), constant_values=fill)
