"""The next token of a text: it is chosen, and may end the text.

Symbols: N sequences, W places, V tokens in the vocabulary, K lanes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.sampling.draws import sample
from jkv.decoding.sampling.filters import by_row
from jkv.decoding.sampling.options import Sampling
from jkv.decoding.sampling.stopping import Bounds, Stops, judge_texts
from jkv.decoding.texts.prompts import Prompts
from jkv.decoding.texts.results import FinishReason, Generation
from jkv.sharding.loops import when


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


def choose_next(
    progress: Progress,
    logits: jax.Array,
    sequences: jax.Array,
    seen: jax.Array | None,
    sampling: Sampling,
) -> tuple[Generation, jax.Array]:
    """Choose a token for sequences, and see whether they end.

    Args:
      progress: of N sequences.
      logits: f32[K, V].
      sequences: i32[K], N for none.
      seen: bool[K, V], tokens of their texts; None where no penalty applies to any.
      sampling: of N sequences.

    Returns:
      What there is then, and i32[K], the tokens.
    """
    result, num_sequences = progress.result, progress.result.lengths.shape[0]
    known = jnp.minimum(sequences, num_sequences - 1)
    chosen = sampling_of(sampling, num_sequences, known)
    positions = result.lengths[known]
    tokens, logprobs = sample(logits, chosen, positions, seen=seen)
    new = _New(sequences, positions, tokens, logprobs)
    written = new.put(result.tokens)
    return _put(result, new, written, _judge(progress, new, written)), tokens


def take_several(
    progress: Progress,
    sequences: jax.Array,
    tokens: jax.Array,
    logprobs: jax.Array,
    follows: jax.Array,
) -> tuple[Generation, jax.Array]:
    """Give texts several tokens that were chosen at once, as if one by one.

    Args:
      progress: of N sequences.
      sequences: i32[W], N for none.
      tokens: i32[W, C].
      logprobs: f32[W, C], of each; NaN if the logits were no numbers.
      follows: bool[W, C], whether the next token may follow this one; not the last.

    Returns:
      What there is then, and bool[W, C], which tokens texts took.
    """
    result, num_sequences = progress.result, progress.result.lengths.shape[0]
    known = jnp.minimum(sequences, num_sequences - 1)
    after = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = (result.lengths[known][:, None] + after).reshape(-1)
    each = jnp.broadcast_to(sequences[:, None], tokens.shape).reshape(-1)
    new = _New(each, positions, tokens.reshape(-1), logprobs.reshape(-1))
    reasons = _judge(progress, new, new.put(result.tokens))
    # A text takes a token if it went on after all of those before.
    goes_on = follows & (reasons == FinishReason.RUNNING).reshape(tokens.shape)
    last = jnp.argmin(goes_on, axis=1).astype(jnp.int32)
    is_taken = (sequences < num_sequences)[:, None] & (after <= last[:, None])
    taken = jnp.where(is_taken.reshape(-1), each, num_sequences)
    new = new._replace(sequences=taken)
    return _put(result, new, new.put(result.tokens), reasons), is_taken


class _New(NamedTuple):
    """New tokens."""

    sequences: jax.Array  # i32[K], N for none
    positions: jax.Array  # i32[K], among the new tokens of the sequence
    tokens: jax.Array  # i32[K]
    logprobs: jax.Array  # f32[K], NaN if the logits were no numbers

    def put(self, tokens: jax.Array) -> jax.Array:
        """Return tokens, i32[N, G], with the new ones."""
        sequences = self.find_served(tokens.shape[0])
        return tokens.at[sequences, self.positions].set(self.tokens, mode="drop")

    def find_served(self, num_sequences: int) -> jax.Array:
        """Return the sequences that get a token, i32[K]; without numbers none."""
        return jnp.where(jnp.isnan(self.logprobs), num_sequences, self.sequences)


def _judge(progress: Progress, new: _New, written: jax.Array) -> jax.Array:
    """Return why texts end after new tokens, RUNNING where they go on, i32[K].

    Those are among the tokens written, i32[N, G].
    """
    known = jnp.minimum(new.sequences, progress.result.lengths.shape[0] - 1)
    reasons = judge_texts(
        progress.prompts,
        progress.stops,
        progress.bounds,
        written,
        known,
        new.positions + 1,
    )
    nan = jnp.int32(FinishReason.NAN_LOGITS)
    return jnp.where(jnp.isnan(new.logprobs), nan, reasons)


def _put(
    result: Generation, new: _New, written: jax.Array, reasons: jax.Array
) -> Generation:
    """Add new tokens, i32[N, G] with them, and end texts for reasons, i32[K]."""
    num_sequences = result.lengths.shape[0]
    served = new.find_served(num_sequences)
    # They all ran until now, and mostly go on.
    ended = jnp.where(reasons == FinishReason.RUNNING, num_sequences, new.sequences)
    return Generation(
        tokens=written,
        lengths=result.lengths.at[served].add(1, mode="drop"),
        reasons=when(
            jnp.any(ended < num_sequences),
            lambda old: old.at[ended].set(reasons, mode="drop"),
            result.reasons,
        ),
        logprobs=result.logprobs.at[served, new.positions].set(
            new.logprobs, mode="drop"
        ),
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
    # Of one number each sequence has a seed of its own.
    is_one["seeds"] = False
    picked = {
        name: getattr(sampling, name) if is_one[name] else values[sequences]
        for name, values in rows.items()
    }
    return Sampling(**picked)
