"""Tokens are chosen, and whether they end their sequences.

Symbols: N sequences, W places, V tokens in the vocabulary, K lanes.
"""

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jkv.decoding.conditions import when
from jkv.decoding.ending import Bounds, Stops, judge_texts
from jkv.decoding.options import Sampling
from jkv.decoding.progress import GenerationState
from jkv.decoding.prompts import Prompts
from jkv.decoding.results import FinishReason, Generation
from jkv.decoding.sampling import by_row, sample
from jkv.sharding.loops import while_loop


class Sampler(Protocol):
    """How tokens are chosen from logits; arguments and results as `sample`."""

    def __call__(
        self,
        logits: jax.Array,
        sampling: Sampling,
        counts: jax.Array,
        *,
        seen: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]: ...


def choose_tokens(
    state: GenerationState,
    bounds: Bounds,
    logits: jax.Array,
    is_ready: jax.Array,
    sampling: Sampling,
) -> GenerationState:
    """Choose the next token of each text that is in the cache whole.

    Args:
      state: the generation.
      bounds: how long a text can become.
      logits: f32[W, V], after the last token of each place's text.
      is_ready: bool[W], whether they are.
      sampling: of N sequences.
    """
    places, result = state.places, state.result
    counts = result.lengths[places.sequences]
    nobody = result.lengths.shape[0]
    sequences = jnp.where(is_ready, places.sequences, nobody)
    state, tokens = _choose(state, bounds, logits, sequences, state.seen, sampling)
    if state.num_samples > 1:
        state = _choose_for_samples(
            state, bounds, logits, is_ready & (counts == 0), sampling
        )
    return _note_seen(state, is_ready, tokens)


def choose_more(
    state: GenerationState,
    bounds: Bounds,
    logits: jax.Array,
    is_ready: jax.Array,
    sampling: Sampling,
    sampler: Sampler,
) -> tuple[GenerationState, jax.Array]:
    """Choose the next token of texts that have one already, in a way of one's own.

    Args:
      state, bounds, logits, is_ready, sampling: as for `choose_tokens`.
      sampler: chooses them.

    Returns:
      The state, and the tokens, i32[W].
    """
    nobody = state.result.lengths.shape[0]
    sequences = jnp.where(is_ready, state.places.sequences, nobody)
    state, tokens = _choose(
        state, bounds, logits, sequences, state.seen, sampling, sampler
    )
    return _note_seen(state, is_ready, tokens), tokens


def _note_seen(
    state: GenerationState, is_ready: jax.Array, tokens: jax.Array
) -> GenerationState:
    """Note that the texts in some places, bool[W], have these tokens now, i32[W]."""
    place = jnp.arange(state.places.num_places, dtype=jnp.int32)
    token = jnp.where(is_ready, tokens, state.seen.shape[1])
    seen = state.seen.at[place, token].set(True, mode="drop")
    return dataclasses.replace(state, seen=seen)


def _choose_for_samples(
    state: GenerationState,
    bounds: Bounds,
    logits: jax.Array,
    is_first: jax.Array,
    sampling: Sampling,
) -> GenerationState:
    """Choose the first tokens of all samples of prompts that are whole, bool[W].

    They are chosen at once, wherever those samples are, so that no logits are kept.
    """
    num_samples = state.num_samples
    Carry = tuple[jax.Array, GenerationState]

    def trip(carry: Carry) -> Carry:
        todo, state = carry
        place = jnp.argmax(todo)
        leader = state.places.sequences[place]
        sample_index = jnp.arange(num_samples, dtype=jnp.int32)
        sequences = lax.div(leader, jnp.int32(num_samples)) * num_samples + sample_index
        is_open = state.is_running[sequences] & (state.result.lengths[sequences] == 0)
        is_open &= sequences != leader
        chosen = jnp.where(is_open, sequences, state.result.lengths.shape[0])

        def spread(row: jax.Array) -> jax.Array:
            return jnp.broadcast_to(row[None], (num_samples, row.shape[0]))

        state, _ = _choose(
            state,
            bounds,
            spread(logits[place]),
            chosen,
            spread(state.seen[place]),
            sampling,
        )
        return todo.at[place].set(False), state

    _, state = while_loop(lambda carry: jnp.any(carry[0]), trip, (is_first, state))
    return state


def _choose(
    state: GenerationState,
    bounds: Bounds,
    logits: jax.Array,
    sequences: jax.Array,
    seen: jax.Array,
    sampling: Sampling,
    sampler: Sampler = sample,
) -> tuple[GenerationState, jax.Array]:
    """Choose a token for sequences of a generation, as `choose_next`."""
    texts = Texts(state.prompts, state.stops, bounds, state.result)
    result, tokens = choose_next(texts, logits, sequences, seen, sampling, sampler)
    return dataclasses.replace(state, result=result), tokens


class Texts(NamedTuple):
    """Texts of N sequences, and what ends them."""

    prompts: Prompts
    stops: Stops
    bounds: Bounds
    result: Generation

    @property
    def is_running(self) -> jax.Array:
        """Which of them have not ended, bool[N]."""
        return self.result.reasons == FinishReason.RUNNING


def choose_next(
    texts: Texts,
    logits: jax.Array,
    sequences: jax.Array,
    seen: jax.Array | None,
    sampling: Sampling,
    sampler: Sampler = sample,
) -> tuple[Generation, jax.Array]:
    """Choose a token for sequences, and see whether they end.

    Args:
      texts: of N sequences.
      logits: f32[K, V].
      sequences: i32[K]; N is nobody.
      seen: bool[K, V], tokens of their texts; None where no penalty applies to any.
      sampling: of N sequences.
      sampler: how.

    Returns:
      What there is then, and i32[K], the tokens.
    """
    result, nobody = texts.result, texts.result.lengths.shape[0]
    known = jnp.minimum(sequences, nobody - 1)
    lengths = result.lengths[known]
    chosen = sampling_of(sampling, nobody, known)
    tokens, logprobs = sampler(logits, chosen, lengths, seen=seen)

    # Without numbers there is no token: the text ends as it is.
    is_nan = jnp.isnan(logprobs)
    gets = jnp.where(is_nan, nobody, sequences)
    result = Generation(
        tokens=result.tokens.at[gets, lengths].set(tokens, mode="drop"),
        lengths=result.lengths.at[gets].add(1, mode="drop"),
        reasons=result.reasons,
        logprobs=result.logprobs.at[gets, lengths].set(logprobs, mode="drop"),
        statistics=result.statistics,
    )
    reasons = judge_texts(texts.prompts, texts.stops, texts.bounds, result, known)
    reasons = jnp.where(is_nan, jnp.int32(FinishReason.NAN_LOGITS), reasons)
    # They all ran until now, and mostly go on.
    ended = jnp.where(reasons == FinishReason.RUNNING, nobody, sequences)
    reasons = when(
        jnp.any(ended < nobody),
        lambda old: old.at[ended].set(reasons, mode="drop"),
        result.reasons,
    )
    return result._replace(reasons=reasons), tokens


def sampling_of(
    sampling: Sampling, num_sequences: int, sequences: jax.Array
) -> Sampling:
    """Return how tokens of some of N sequences, i32[K], are chosen.

    What holds for all sequences stays one number.
    """
    rows = by_row(sampling, num_sequences)._asdict()
    is_one = {name: jnp.ndim(getattr(sampling, name)) == 0 for name in rows}
    # A number for all is the first of consecutive seeds.
    is_one["seeds"] = False
    picked = {
        name: getattr(sampling, name) if is_one[name] else values[sequences]
        for name, values in rows.items()
    }
    return Sampling(**picked)
