"""Guesses are checked: one step computes them all, and tokens are chosen as ever.

The rows of a step are each text's newest token and the guesses behind it, if there are
any. The token after each row is chosen from its logits as a plain step would, taking
the guesses before it as right; so it counts for as long as they are. The rows behind
the first wrong guess are cut off.

Symbols: W places, K guesses of each, R rows of a step, V tokens in the vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.model.rows import choose_size
from jkv.decoding.model.runner import Runner
from jkv.decoding.sampling.draws import Choice
from jkv.decoding.sampling.next_token import sampling_of, take_several
from jkv.decoding.sampling.options import Sampling
from jkv.decoding.scheduler.new_tokens import note_seen
from jkv.decoding.scheduler.state import GenerationState, Loads
from jkv.decoding.scheduler.step import count_step, note_refusals
from jkv.decoding.speculation.guesses import Guesses, Rows, row_sizes
from jkv.decoding.steering.rows import SteeredRows, mark_refused
from jkv.decoding.texts.prompts import find_tokens
from jkv.sharding.loops import when
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.verbs.appending import append
from jkv.verbs.attention_plan import plan_attention
from jkv.verbs.commitment import commit
from jkv.verbs.truncation import truncate

# How the token after each row is chosen: of logits f32[R, V], whose rows they are, the
# sampling, how many new tokens each text has then, i32[R], and which tokens at all,
# bool[R, V]. It returns tokens, i32[R], and the log-probability of each, f32[R].
Sampler = Callable[
    [jax.Array, Rows, Sampling, jax.Array, jax.Array], tuple[jax.Array, jax.Array]
]


class _Chosen(NamedTuple):
    """The token after each row, if the guesses before it are right."""

    tokens: jax.Array  # i32[R]
    logprobs: jax.Array  # f32[R]


def check_guesses(
    runner: Runner,
    cache: Cache,
    state: GenerationState,
    choice: Choice,  # of N sequences
    guesses: Guesses,  # for W places
    sampler: Sampler,  # how tokens are chosen
) -> tuple[Cache, GenerationState, jax.Array]:
    """Do a step with guesses, in which each text that runs lacks one token.

    Returns also i32[W], how many guesses of each were right.
    """
    loads, places = state.loads(cache), state.places
    steered = state.rows_of(choice.steering)
    if steered is not None:
        steered = steered.advance_through(guesses.mask())
    choose = functools.partial(
        _choose_rows, state, choice.sampling, guesses, sampler, steered
    )
    cache, batch, chosen = _compute_guesses(
        runner, cache, state, loads, guesses, choose
    )
    num_rows = batch.query_lengths
    state = count_step(cache, state, loads, jnp.minimum(num_rows, 1))
    state = note_refusals(state, batch.status)
    before = state.result.lengths[places.sequences]
    state = _take_checked(cache, state, guesses, batch, chosen, steered)
    made = state.result.lengths[places.sequences] - before
    made = jnp.where(num_rows > 0, made, 0)
    cache = _keep(cache, batch, loads, jnp.minimum(made, num_rows))
    accepted = jnp.maximum(made - 1, 0)
    result = state.result.add_counts(
        draft_tokens=jnp.sum(jnp.maximum(num_rows - 1, 0), dtype=jnp.int32),
        accepted_tokens=jnp.sum(accepted, dtype=jnp.int32),
        checking_steps=jnp.int32(1),
    )
    return cache, dataclasses.replace(state, result=result), accepted


def _compute_guesses(
    runner: Runner,
    cache: Cache,
    state: GenerationState,
    loads: Loads,
    guesses: Guesses,
    choose: Callable[[jax.Array, Rows], _Chosen],
) -> tuple[Cache, Batch, _Chosen]:
    """Compute the newest token of each text and the guesses behind it.

    The step, R rows, is planned for the most that there can be; the model computes the
    first of them, as many as the smallest size that holds the guesses.
    """
    sizes, places = row_sizes(*guesses.tokens.shape), state.places
    is_ready = places.is_cached & places.is_running
    counts = jnp.where(is_ready, 1 + guesses.counts, 0)
    rows = Rows.of(counts, sizes[-1])
    newest = find_tokens(state.prompts, state.result, places.sequences, loads.done)
    of_place = jnp.concatenate([newest[:, None], guesses.tokens], axis=1)
    tokens = of_place.at[rows.places, rows.before].get(mode="clip")
    seq_ids = jnp.where(is_ready, places.seq_ids, NO_SEQUENCE)
    has_states = cache.metadata.has_states
    cache, batch = append(
        cache,
        seq_ids,
        counts,
        capacity=sizes[-1],
        tokens=tokens,
        num_pending=jnp.where(has_states, guesses.counts, 0),
    )
    # Each size has a plan of its own.
    batch = dataclasses.replace(batch, plan=None)
    leaves, structure = jax.tree.flatten((tokens, rows, batch))
    Carry = tuple[Cache, _Chosen]

    def program(size: int) -> Callable[..., Carry]:
        def compute(carry: Carry, *leaves: jax.Array) -> Carry:
            cache, chosen = carry
            tokens, rows, batch = jax.tree.unflatten(structure, leaves)
            first = plan_attention(cache, batch.first_rows(size))
            cache, logits = runner.run_planned(cache, first, tokens[:size])
            found = choose(logits, Rows(*(each[:size] for each in rows)))
            put = jax.tree.map(lambda old, new: old.at[:size].set(new), chosen, found)
            return cache, put

        return compute

    nothing = _Chosen(tokens, jnp.zeros(tokens.shape, jnp.float32))
    carry, size = (cache, nothing), choose_size(jnp.sum(counts), sizes)
    for i, num_rows in enumerate(sizes):
        carry = when(size == i, program(num_rows), carry, *leaves)
    return carry[0], batch, carry[1]


def _choose_rows(
    state: GenerationState,
    sampling: Sampling,
    guesses: Guesses,
    sampler: Sampler,
    steered: SteeredRows | None,  # W * (K + 1) rows
    logits: jax.Array,  # f32[R, V]
    rows: Rows,
) -> _Chosen:
    """Choose the token after each row, taking the guesses before it as right."""
    sequences, vocabulary = state.places.sequences[rows.places], state.seen.shape[1]
    chosen = sampling_of(sampling, state.result.lengths.shape[0], sequences)
    counts = state.result.lengths[sequences] + rows.before
    guess = jnp.arange(guesses.tokens.shape[1], dtype=jnp.int32)[None]
    is_before = guess < rows.before[:, None]
    token = jnp.where(is_before, guesses.tokens[rows.places], vocabulary)
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    seen = state.seen[rows.places].at[row, token].set(True, mode="drop")
    if steered is None:
        return _Chosen(*sampler(logits, rows, chosen, counts, seen))
    row_of = rows.places * (guesses.tokens.shape[1] + 1) + rows.before
    logits = steered.pick(row_of).steer(logits)
    tokens, logprobs = sampler(logits, rows, chosen, counts, seen)
    return _Chosen(tokens, mark_refused(logits, tokens, logprobs))


def _take_checked(
    cache: Cache,
    state: GenerationState,
    guesses: Guesses,
    batch: Batch,
    chosen: _Chosen,
    steered: SteeredRows | None,  # W * (K + 1) rows
) -> GenerationState:
    """Let texts have their tokens for as long as guesses are right."""
    num_tokens = guesses.tokens.shape[1]
    after = jnp.arange(num_tokens + 1, dtype=jnp.int32)[None]
    row = batch.query_starts[:, None] + after
    tokens, logprobs = (array.at[row].get(mode="clip") for array in chosen)
    guess = jnp.pad(guesses.tokens, ((0, 0), (0, 1)))
    is_right = (after < guesses.counts[:, None]) & (tokens == guess)
    num_sequences = state.result.lengths.shape[0]
    has_rows = batch.query_lengths > 0
    sequences = jnp.where(has_rows, state.places.sequences, num_sequences)
    result, is_taken = take_several(
        state.progress(cache), sequences, tokens, logprobs, is_right, steered
    )
    return note_seen(dataclasses.replace(state, result=result), is_taken, tokens)


def _keep(cache: Cache, batch: Batch, loads: Loads, kept: jax.Array) -> Cache:
    """Cut off the rows behind the first `kept` of each, i32[W], and commit those."""
    lengths = loads.done + kept
    cuts = kept < batch.query_lengths
    seq_ids = jnp.where(cuts, batch.seq_ids, NO_SEQUENCE)
    cache, _ = truncate(cache, seq_ids, lengths)
    shorter = dataclasses.replace(
        batch,
        query_lengths=kept,
        context_lengths=jnp.where(kept > 0, lengths, batch.context_lengths),
        epochs=cache.metadata.index.epochs_of(batch.seq_ids),
    )
    return commit(cache, shorter)
