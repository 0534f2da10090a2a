"""Tokens are chosen, and whether they end their sequences.

Symbols: N sequences, W places, V tokens in the vocabulary, K lanes.
"""

import dataclasses
from typing import NamedTuple

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


def take_tokens(
    state: GenerationState,
    bounds: Bounds,
    is_ready: jax.Array,
    tokens: jax.Array,
    logprobs: jax.Array,
    follows: jax.Array,
) -> GenerationState:
    """Give texts several tokens that were chosen at once, as if one by one.

    Args:
      state, bounds, is_ready: as for `choose_tokens`; the texts have a token already.
      tokens: i32[W, C].
      logprobs: f32[W, C], of each; NaN if the logits were no numbers.
      follows: bool[W, C], whether the next token may follow this one; not the last.
    """
    result, nobody = state.result, state.result.lengths.shape[0]
    texts = Texts(state.prompts, state.stops, bounds, result)
    after = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    sequences = state.places.sequences
    positions = (result.lengths[sequences][:, None] + after).reshape(-1)
    sequences = jnp.where(is_ready, sequences, nobody)
    sequences = jnp.broadcast_to(sequences[:, None], tokens.shape).reshape(-1)
    new = _New(sequences, positions, tokens.reshape(-1), logprobs.reshape(-1))
    reasons = _judge(texts, new, new.put(result.tokens))
    # A text takes a token if it went on after all of those before.
    goes_on = follows & (reasons == FinishReason.RUNNING).reshape(tokens.shape)
    last = jnp.argmin(goes_on, axis=1).astype(jnp.int32)
    is_taken = is_ready[:, None] & (after <= last[:, None])
    new = new._replace(sequences=jnp.where(is_taken.reshape(-1), sequences, nobody))
    result = _put(result, new, new.put(result.tokens), reasons)
    state = dataclasses.replace(state, result=result)
    return _note_seen(state, is_taken, tokens)


def _note_seen(
    state: GenerationState, is_ready: jax.Array, tokens: jax.Array
) -> GenerationState:
    """Note that texts have these tokens now, i32[W] or i32[W, C], where bool[...]."""
    place = jnp.arange(state.places.num_places, dtype=jnp.int32)
    place = place.reshape(-1, *(1,) * (tokens.ndim - 1))
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
) -> tuple[GenerationState, jax.Array]:
    """Choose a token for sequences of a generation, as `choose_next`."""
    texts = Texts(state.prompts, state.stops, bounds, state.result)
    result, tokens = choose_next(texts, logits, sequences, seen, sampling)
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
) -> tuple[Generation, jax.Array]:
    """Choose a token for sequences, and see whether they end.

    Args:
      texts: of N sequences.
      logits: f32[K, V].
      sequences: i32[K]; N is nobody.
      seen: bool[K, V], tokens of their texts; None where no penalty applies to any.
      sampling: of N sequences.

    Returns:
      What there is then, and i32[K], the tokens.
    """
    result, nobody = texts.result, texts.result.lengths.shape[0]
    known = jnp.minimum(sequences, nobody - 1)
    chosen = sampling_of(sampling, nobody, known)
    positions = result.lengths[known]
    tokens, logprobs = sample(logits, chosen, positions, seen=seen)
    new = _New(sequences, positions, tokens, logprobs)
    written = new.put(result.tokens)
    return _put(result, new, written, _judge(texts, new, written)), tokens


class _New(NamedTuple):
    """New tokens."""

    sequences: jax.Array  # i32[K]; N is nobody
    positions: jax.Array  # i32[K], among the new tokens of the sequence
    tokens: jax.Array  # i32[K]
    logprobs: jax.Array  # f32[K], NaN if the logits were no numbers

    def put(self, tokens: jax.Array) -> jax.Array:
        """Return tokens, i32[N, G], with the new ones."""
        gets = self.who_gets(tokens.shape[0])
        return tokens.at[gets, self.positions].set(self.tokens, mode="drop")

    def who_gets(self, nobody: int) -> jax.Array:
        """Return the sequences, i32[K]: without numbers there is no token."""
        return jnp.where(jnp.isnan(self.logprobs), nobody, self.sequences)


def _judge(texts: Texts, new: _New, written: jax.Array) -> jax.Array:
    """Return why texts end after new tokens, RUNNING where they go on, i32[K].

    Those are among the tokens written, i32[N, G].
    """
    known = jnp.minimum(new.sequences, texts.result.lengths.shape[0] - 1)
    reasons = judge_texts(
        texts.prompts,
        texts.stops,
        texts.bounds,
        written,
        known,
        new.positions + 1,
    )
    nan = jnp.int32(FinishReason.NAN_LOGITS)
    return jnp.where(jnp.isnan(new.logprobs), nan, reasons)


def _put(
    result: Generation, new: _New, written: jax.Array, reasons: jax.Array
) -> Generation:
    """Add new tokens, i32[N, G] with them, and end who has a reason to, i32[K]."""
    nobody = result.lengths.shape[0]
    gets = new.who_gets(nobody)
    # They all ran until now, and mostly go on.
    ended = jnp.where(reasons == FinishReason.RUNNING, nobody, new.sequences)
    return Generation(
        tokens=written,
        lengths=result.lengths.at[gets].add(1, mode="drop"),
        reasons=when(
            jnp.any(ended < nobody),
            lambda old: old.at[ended].set(reasons, mode="drop"),
            result.reasons,
        ),
        logprobs=result.logprobs.at[gets, new.positions].set(new.logprobs, mode="drop"),
        statistics=result.statistics,
    )


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
