"""Verification of draft tokens in one step.

The rows of a step are each sequence's newest token and its draft tokens. The token
after each row is chosen from its logits as in a plain step, assuming that the draft
tokens before it are right; so it counts only while they are. The rows after the first
rejected draft token are truncated.

A prompt-lookup token is not a random draw: sampling a token and comparing it with the
draft token accepts with the right probability. A drawn draft token uses rejection
sampling: with p the model's filtered distribution and q the draft model's, token x is
accepted with probability min(1, p(x) / q(x)); otherwise a token is drawn from
max(0, p - q), normalised. Either way the result has the distribution p (Leviathan et
al., 2023, and Chen et al., 2023).

Symbols: W places, K draft tokens of each, R rows of a step, V vocabulary size.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.decoding.model.runner import Runner, choose_size
from jkv.decoding.sampling.draws import (
    Choice,
    Sampling,
    by_row,
    draw,
    draw_uniforms,
    filter_logits,
    find_best,
    pick_logprobs,
    sample,
)
from jkv.decoding.sampling.next_token import (
    ProcessorRows,
    mark_refused,
    sampling_of,
    take_several,
)
from jkv.decoding.scheduler.hidden import HiddenRows, follow
from jkv.decoding.scheduler.state import ActiveSequences, GenerationState
from jkv.decoding.scheduler.step import count_step, note_refusals, note_seen
from jkv.decoding.speculation.draft_step import ACCEPT, REPLACE
from jkv.decoding.speculation.draft_tokens import DraftTokenRows, DraftTokens, row_sizes
from jkv.operations import gather, scatter, when
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.verbs.appending import append
from jkv.verbs.attending import plan_attention
from jkv.verbs.branching import truncate
from jkv.verbs.recording import record
from jkv.verbs.writing import commit


class _Chosen(NamedTuple):
    """The token after each row, given that the draft tokens before it are right."""

    tokens: jax.Array  # i32[R]
    logprobs: jax.Array  # f32[R]


class Verification(NamedTuple):
    """Inputs of a verification."""

    state: GenerationState
    active: ActiveSequences  # before the step
    choice: Choice  # of N sequences
    drafted: DraftTokens  # draft tokens of W places
    # f32[W, K, V], filtered logits they were drawn from; None if they were not drawn
    draft_logits: jax.Array | None
    batch: Batch  # the rows of the step, appended
    hidden: HiddenRows | None  # for a drafter with auxiliary layers


def append_rows(
    cache: Cache,
    state: GenerationState,
    active: ActiveSequences,
    counts: jax.Array,  # i32[W], draft tokens of each place
    num_tokens: int,  # K
    tokens: jax.Array | None = None,  # i32[W, K], None before they are drafted
) -> tuple[Cache, Batch]:
    """Append the newest token of each sequence and its draft tokens.

    The step, R rows, is planned for the most draft tokens; the model computes the first
    of them, as many as the smallest sufficient size.
    """
    places = state.places
    is_ready = places.is_cached & places.is_running
    num_rows = jnp.where(is_ready, 1 + counts, 0)
    most, known = row_sizes(places.num_places, num_tokens)[-1], None
    if tokens is not None:
        rows = DraftTokenRows.of(num_rows, most)
        known = _tokens_of_rows(state.newest(active), tokens, rows)
    cache, batch = append(
        cache,
        jnp.where(is_ready, places.seq_ids, NO_SEQUENCE),
        num_rows,
        capacity=most,
        tokens=known,
        num_pending=jnp.where(cache.metadata.has_states, counts, 0),
    )
    # Each size has a plan of its own.
    return cache, dataclasses.replace(batch, plan=None)


def _tokens_of_rows(
    newest: jax.Array, drafted: jax.Array, rows: DraftTokenRows
) -> jax.Array:
    """Return the tokens of rows, i32[R]: the newest token, then the draft tokens."""
    of_place = jnp.concatenate([newest[:, None], drafted], axis=1)
    return gather(of_place, (rows.places, rows.before))


def verify_draft_tokens(
    runner: Runner, cache: Cache, given: Verification
) -> tuple[Cache, GenerationState, jax.Array, HiddenRows | None]:
    """Run a step that verifies draft tokens, and update the drafter.

    Returns:
      The cache, the state, the accepted draft tokens, i32[W], and the hidden states.
    """
    state, active, choice, drafted, logits, batch, hidden = given
    places = state.places
    processor = state.rows_of(choice.logits_processor)
    if processor is not None:
        processor = processor.advance_through(drafted.mask())
    check = _Check(state, choice.sampling, drafted, logits, processor)
    step = _plan_step(state, active, drafted, batch)
    cache, chosen, of_rows = _compute_draft_tokens(runner, cache, step, check, hidden)
    num_rows = batch.query_lengths
    state = count_step(cache, state, active, jnp.minimum(num_rows, 1))
    state = note_refusals(state, batch.status)
    lengths = gather(state.result.lengths, places.sequences)
    state = _append_accepted(cache, state, check, batch, chosen)
    made = gather(state.result.lengths, places.sequences) - lengths
    made = jnp.where(num_rows > 0, made, 0)
    # The newest token stays in the cache, even if none can follow it.
    kept = jnp.clip(made, jnp.minimum(num_rows, 1), num_rows)
    cache, hidden = _update(runner, cache, given, step, kept, of_rows)
    cache = _keep(cache, batch, kept)
    accepted = jnp.maximum(made - 1, 0)
    num_drafted = jnp.where(num_rows > 0, drafted.counts, 0)
    result = state.result.add_counts(
        draft_tokens=jnp.sum(num_drafted, dtype=jnp.int32),
        accepted_tokens=jnp.sum(accepted, dtype=jnp.int32),
        checking_steps=jnp.int32(1),
    )
    return cache, dataclasses.replace(state, result=result), accepted, hidden


class _Step(NamedTuple):
    """The rows of a verifying step."""

    batch: Batch  # without a plan
    rows: DraftTokenRows
    tokens: jax.Array  # i32[R]
    sizes: tuple[int, ...]  # rows that the model may compute, ascending
    size: jax.Array  # i32[], the index of the size used


def _plan_step(
    state: GenerationState,
    active: ActiveSequences,
    drafted: DraftTokens,
    batch: Batch,
) -> _Step:
    """Locate the rows of a step, and choose the number of rows to compute."""
    sizes = row_sizes(*drafted.tokens.shape)
    # A refused request keeps its rows in the layout.
    ends = jnp.append(batch.query_starts[1:], jnp.int32(sizes[-1]))
    rows = DraftTokenRows.of(ends - batch.query_starts, sizes[-1])
    tokens = _tokens_of_rows(state.newest(active), drafted.tokens, rows)
    work = jnp.max(batch.query_starts + batch.query_lengths)
    return _Step(batch, rows, tokens, sizes, choose_size(work, sizes))


class _Check(NamedTuple):
    """Inputs of a choice."""

    state: GenerationState
    sampling: Sampling
    drafted: DraftTokens
    draft_logits: jax.Array | None
    processor: ProcessorRows | None  # W * (K + 1) rows

    def choose(self, logits: jax.Array, rows: DraftTokenRows) -> _Chosen:
        """Choose the token after each row, as if the draft tokens before were right."""
        state, drafted = self.state, self.drafted.tokens
        sequences = gather(state.places.sequences, rows.places)
        sampling = sampling_of(self.sampling, state.result.lengths.shape[0], sequences)
        counts = gather(state.result.lengths, sequences) + rows.before
        index = jnp.arange(drafted.shape[1], dtype=jnp.int32)[None]
        is_before = index < rows.before[:, None]
        token = jnp.where(is_before, gather(drafted, rows.places), state.seen.shape[1])
        row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        seen = scatter(gather(state.seen, rows.places), (row, token), True)
        if self.processor is not None:
            row_of = rows.places * (drafted.shape[1] + 1) + rows.before
            logits = self.processor.pick(row_of).process(logits)
        tokens, logprobs = self._sample(logits, rows, sampling, counts, seen)
        if self.processor is not None:
            logprobs = mark_refused(logits, tokens, logprobs)
        return _Chosen(tokens, logprobs)

    def _sample(
        self,
        logits: jax.Array,
        rows: DraftTokenRows,
        sampling: Sampling,
        counts: jax.Array,
        seen: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Choose tokens as in a plain step, or by rejection sampling."""

        def plain() -> tuple[jax.Array, jax.Array]:
            return sample(logits, sampling, counts, seen=seen)

        if self.draft_logits is None:
            return plain()
        drafted, draft_logits = self.drafted, self.draft_logits
        by = by_row(sampling, logits.shape[0])
        if by.temperature is None:
            return plain()
        is_greedy = by.temperature <= 0
        # The draft token after each row, if any.
        draft = rows.places, jnp.minimum(rows.before, drafted.tokens.shape[1] - 1)

        def reject() -> tuple[jax.Array, jax.Array]:
            wanted = filter_logits(logits, sampling, seen=seen)
            tokens = accept_or_replace(
                wanted,
                gather(draft_logits, draft),
                gather(drafted.tokens, draft),
                rows.before < gather(drafted.counts, rows.places),
                by.seeds,
                counts,
            )
            tokens = jnp.where(is_greedy, find_best(wanted), tokens)
            return tokens, pick_logprobs(logits, tokens)

        return lax.cond(jnp.all(is_greedy), plain, reject)


def _compute_draft_tokens(
    runner: Runner,
    cache: Cache,
    step: _Step,
    check: _Check,
    hidden_rows: HiddenRows | None,
) -> tuple[Cache, _Chosen, jax.Array]:
    """Compute the newest token of each sequence and its draft tokens.

    Return the cache, the token after each row, and the hidden states, f32[R, A].
    """
    leaves, structure = jax.tree.flatten((step.tokens, step.rows, step.batch))
    Carry = tuple[Cache, _Chosen, jax.Array]

    def program(size: int) -> Callable[..., Carry]:
        def compute(carry: Carry, *leaves: jax.Array) -> Carry:
            cache, chosen, hidden = carry
            tokens, rows, batch = jax.tree.unflatten(structure, leaves)
            first = plan_attention(cache, batch.first_rows(size))
            cache, logits, of_rows = runner.compute_hidden(
                cache, first, tokens[:size], all_rows=True
            )
            found = check.choose(
                logits, DraftTokenRows(*(each[:size] for each in rows))
            )
            put = jax.tree.map(
                lambda old, new: old.at[:size].set(new),
                (chosen, hidden),
                (found, of_rows),
            )
            return cache, *put

        return compute

    nothing = _Chosen(step.tokens, jnp.zeros(step.tokens.shape, jnp.float32))
    width = 0 if hidden_rows is None else hidden_rows.rows.shape[1]
    hidden = jnp.zeros((step.tokens.shape[0], width), jnp.float32)
    carry = cache, nothing, hidden
    for i, num_rows in enumerate(step.sizes):
        carry = when(step.size == i, program(num_rows), carry, *leaves)
    return carry


def _update(
    runner: Runner,
    cache: Cache,
    given: Verification,
    step: _Step,
    kept: jax.Array,  # i32[W], accepted rows
    of_rows: jax.Array,  # f32[R, A], hidden states
) -> tuple[Cache, HiddenRows | None]:
    """Update the drafter with the accepted rows only, and keep their hidden states.

    Rows left from drafting are overwritten, or will be cut off.
    """
    state, active, hidden = given.state, given.active, given.hidden
    drafter = runner.drafter
    assert drafter is not None
    follower = follow(drafter, hidden, state, active)
    if follower is None:
        return cache, hidden
    accepted = step.batch.keep_first(kept)
    if hidden is not None:
        last = follower.read_last(accepted, of_rows)
        hidden = hidden.note(state, active, kept, last)
    if not drafter.groups:
        return cache, hidden
    cache = record(cache, accepted, step.tokens)
    leaves, structure = jax.tree.flatten((step.tokens, of_rows, accepted))

    def program(size: int) -> Callable[..., Cache]:
        def update(cache: Cache, *leaves: jax.Array) -> Cache:
            tokens, of_rows, batch = jax.tree.unflatten(structure, leaves)
            first = plan_attention(cache, batch.first_rows(size))
            return follower.update(cache, first, tokens[:size], of_rows[:size])

        return update

    for i, num_rows in enumerate(step.sizes):
        cache = when(step.size == i, program(num_rows), cache, *leaves)
    return cache, hidden


def _append_accepted(
    cache: Cache,
    state: GenerationState,
    check: _Check,
    batch: Batch,
    chosen: _Chosen,
) -> GenerationState:
    """Append tokens to sequences as long as their draft tokens are right."""
    drafted = check.drafted
    num_tokens = drafted.tokens.shape[1]
    after = jnp.arange(num_tokens + 1, dtype=jnp.int32)[None]
    row = batch.query_starts[:, None] + after
    tokens, logprobs = (gather(array, row) for array in chosen)
    proposed = jnp.pad(drafted.tokens, ((0, 0), (0, 1)))
    is_right = (after < drafted.counts[:, None]) & (tokens == proposed)
    num_sequences = state.result.lengths.shape[0]
    has_rows = batch.query_lengths > 0
    sequences = jnp.where(has_rows, state.places.sequences, num_sequences)
    result, is_taken = take_several(
        state.progress(cache), sequences, tokens, logprobs, is_right, check.processor
    )
    return note_seen(dataclasses.replace(state, result=result), is_taken, tokens)


def _keep(cache: Cache, batch: Batch, kept: jax.Array) -> Cache:
    """Truncate each sequence to its first `kept` rows, i32[W], and commit them."""
    lengths = batch.context_lengths - batch.query_lengths + kept  # slots
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


def accept_or_replace(
    wanted: jax.Array,  # f32[R, V], filtered logits of the model
    draft_logits: jax.Array,  # f32[R, V], logits the draft token was drawn from
    drafted: jax.Array,  # i32[R], draft tokens
    is_drafted: jax.Array,  # bool[R], the row has a draft token; else a token is drawn
    seeds: jax.Array,  # i32[R], of each sequence
    counts: jax.Array,  # i32[R], tokens generated so far
) -> jax.Array:
    """Accept or replace draft tokens, i32[R], by rejection sampling."""
    probability, of_draft = jax.nn.softmax(wanted), jax.nn.softmax(draft_logits)

    def at_drafted(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, drafted[:, None], axis=-1)[:, 0]

    chance = draw_uniforms(seeds, counts, ACCEPT)[:, 0]
    accepts = is_drafted & (chance * at_drafted(of_draft) < at_drafted(probability))

    rest = jnp.where(is_drafted[:, None], probability - of_draft, probability)
    # Equal distributions leave only rounding errors, or nothing.
    is_empty = jnp.max(rest, axis=-1, keepdims=True) <= 0
    rest = jnp.where(is_empty, probability, jnp.maximum(rest, 0.0))
    log_rest = jnp.log(rest)
    log_rest -= jnp.max(log_rest, axis=-1, keepdims=True)
    return jnp.where(accepts, drafted, draw(log_rest, seeds, counts, REPLACE))
