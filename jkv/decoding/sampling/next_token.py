"""The next token of a text: it is chosen, and may end the text.

Symbols: N sequences, W places, V tokens in the vocabulary, K lanes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.sampling.draws import Choice
from jkv.decoding.sampling.filters import by_row
from jkv.decoding.sampling.options import Sampling
from jkv.decoding.sampling.stopping import Progress, judge_texts
from jkv.decoding.steering.rows import SteeredRows, mark_refused, rows_of
from jkv.decoding.texts.results import FinishReason, Generation
from jkv.indexing import gather, scatter, scatter_add
from jkv.sharding.loops import when


def choose_next(
    progress: Progress,  # of N sequences
    logits: jax.Array,  # f32[K, V]
    sequences: jax.Array,  # i32[K], N for none
    # bool[K, V], tokens of their texts; None where no penalty applies to any
    seen: jax.Array | None,
    choice: Choice,  # of N sequences
) -> tuple[Generation, jax.Array, jax.Array]:
    """Choose a token for sequences, i32[K], and see whether they end.

    Returns also f32[K, V], the logits that they were chosen from: a loop that keeps
    memory for logits keeps these, so that what steers them writes where they are.
    """
    result, num_sequences = progress.result, progress.result.lengths.shape[0]
    known = jnp.minimum(sequences, num_sequences - 1)
    chosen = sampling_of(choice.sampling, num_sequences, known)
    positions = gather(result.lengths, known)
    steered = rows_of(choice.steering, progress.prompts, result, known)
    if steered is not None:
        logits = steered.steer(logits)
    tokens, logprobs = choice.sample(logits, chosen, positions, seen)
    if steered is not None:
        logprobs = mark_refused(logits, tokens, logprobs)
        steered = steered.advance(tokens)
    new = _New(sequences, positions, tokens, logprobs, steered)
    written = new.put(result.tokens)
    reasons = _judge(progress, new, written)
    result = _put(result, new, written, reasons, new.find_served(num_sequences))
    return result, tokens, logits


def take_several(
    progress: Progress,  # of N sequences
    sequences: jax.Array,  # i32[W], N for none
    tokens: jax.Array,  # i32[W, C]
    logprobs: jax.Array,  # f32[W, C], as those of a `_New`
    # bool[W, C], whether the next token may follow this one; not the last
    follows: jax.Array,
    before: SteeredRows | None,  # W * C rows, what steers each of them
) -> tuple[Generation, jax.Array]:
    """Give texts tokens chosen at once; return which ones they took, bool[W, C]."""
    result, num_sequences = progress.result, progress.result.lengths.shape[0]
    known = jnp.minimum(sequences, num_sequences - 1)
    after = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = (gather(result.lengths, known)[:, None] + after).reshape(-1)
    each = jnp.broadcast_to(sequences[:, None], tokens.shape).reshape(-1)
    flat = tokens.reshape(-1)
    steered = None if before is None else before.advance(flat)
    new = _New(each, positions, flat, logprobs.reshape(-1), steered)
    reasons = _judge(progress, new, new.put(result.tokens))
    # A text takes a token if it went on after all of those before.
    goes_on = follows & (reasons == FinishReason.RUNNING).reshape(tokens.shape)
    last = jnp.argmin(goes_on, axis=1).astype(jnp.int32)
    is_taken = (sequences < num_sequences)[:, None] & (after <= last[:, None])
    taken = jnp.where(is_taken.reshape(-1), each, num_sequences)
    new = new._replace(sequences=taken)
    is_last = (after == last[:, None]).reshape(-1)
    newest = jnp.where(is_last, new.find_served(num_sequences), num_sequences)
    return _put(result, new, new.put(result.tokens), reasons, newest), is_taken


class _New(NamedTuple):
    """New tokens."""

    sequences: jax.Array  # i32[K], N for none
    positions: jax.Array  # i32[K], among the new tokens of the sequence
    tokens: jax.Array  # i32[K]
    # f32[K], NaN if the logits were no numbers, -inf if no token was allowed
    logprobs: jax.Array
    steered: SteeredRows | None  # K rows, after the tokens

    def put(self, tokens: jax.Array) -> jax.Array:
        """Return tokens, i32[N, G], with the new ones."""
        sequences = self.find_served(tokens.shape[0])
        return scatter(tokens, (sequences, self.positions), self.tokens)

    def find_served(self, num_sequences: int) -> jax.Array:
        """Return the sequences that get a token, i32[K]; N for those without."""
        has_none = jnp.isnan(self.logprobs)
        if self.steered is not None:
            has_none |= self.is_refused
        return jnp.where(has_none, num_sequences, self.sequences)

    @property
    def is_refused(self) -> jax.Array:
        """Which were allowed no token, bool[K], of those that are steered."""
        return self.logprobs == -jnp.inf


def _judge(progress: Progress, new: _New, written: jax.Array) -> jax.Array:
    """Return why texts end after tokens, among those written, i32[N, G]; i32[K]."""
    known = jnp.minimum(new.sequences, progress.result.lengths.shape[0] - 1)
    ended = new.steered and new.steered.has_ended()
    reasons = judge_texts(progress, written, known, new.positions + 1, ended)
    if new.steered is not None:
        nothing = jnp.int32(FinishReason.NOTHING_ALLOWED)
        reasons = jnp.where(new.is_refused, nothing, reasons)
    nan = jnp.int32(FinishReason.NAN_LOGITS)
    return jnp.where(jnp.isnan(new.logprobs), nan, reasons)


def _put(
    result: Generation,  # of N sequences
    new: _New,  # K tokens
    written: jax.Array,  # i32[N, G], with them
    reasons: jax.Array,  # i32[K], why texts end with each
    # i32[K], the sequence of which it is the newest token, N for none
    newest: jax.Array,
) -> Generation:
    """Add new tokens, and end texts."""
    num_sequences = result.lengths.shape[0]
    served = new.find_served(num_sequences)
    # They all ran until now, and mostly go on.
    ended = jnp.where(reasons == FinishReason.RUNNING, num_sequences, new.sequences)
    return result._replace(
        tokens=written,
        lengths=scatter_add(result.lengths, served, 1),
        reasons=when(
            jnp.any(ended < num_sequences),
            lambda old: scatter(old, ended, reasons),
            result.reasons,
        ),
        logprobs=scatter(result.logprobs, (served, new.positions), new.logprobs),
        steering_state=jax.tree.map(
            lambda rows, new: scatter(rows, newest, new),
            result.steering_state,
            new.steered and new.steered.state,
        ),
    )


def sampling_of(
    sampling: Sampling, num_sequences: int, sequences: jax.Array
) -> Sampling:
    """Return how tokens of some of N sequences are chosen, i32[K]; a number stays."""
    rows = by_row(sampling, num_sequences)._asdict()
    is_one = {name: jnp.ndim(getattr(sampling, name)) == 0 for name in rows}
    # Of one number each sequence has a seed of its own.
    is_one["seeds"] = False
    picked = {
        name: getattr(sampling, name) if is_one[name] else gather(values, sequences)
        for name, values in rows.items()
    }
    return Sampling(**picked)
