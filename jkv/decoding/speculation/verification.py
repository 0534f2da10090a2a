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
from jkv.decoding.processors.rows import ProcessorRows, mark_refused
from jkv.decoding.sampling.draws import (
    Choice,
    by_row,
    draw,
    draw_uniforms,
    filter_logits,
    find_best,
    pick_logprobs,
    sample,
)
from jkv.decoding.sampling.next_token import sampling_of, take_several
from jkv.decoding.sampling.options import Sampling
from jkv.decoding.scheduler.state import ActiveSequences, GenerationState
from jkv.decoding.scheduler.step import count_step, note_refusals, note_seen
from jkv.decoding.speculation.draft_tokens import DraftTokenRows, DraftTokens, row_sizes
from jkv.indexing import gather, scatter
from jkv.sharding.loops import when
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.verbs.appending import append
from jkv.verbs.attending import plan_attention
from jkv.verbs.branching import truncate
from jkv.verbs.writing import commit

# Streams of random numbers beside plain draws.
DRAFT, ACCEPT, REPLACE = 1, 2, 3


class _Chosen(NamedTuple):
    """The token after each row, given that the draft tokens before it are right."""

    tokens: jax.Array  # i32[R]
    logprobs: jax.Array  # f32[R]


def verify_draft_tokens(
    runner: Runner,
    cache: Cache,
    state: GenerationState,
    choice: Choice,  # of N sequences
    drafted: DraftTokens,  # draft tokens of W places
    # f32[W, K, V], filtered logits of the draft model; None for prompt lookup
    draft_logits: jax.Array | None,
) -> tuple[Cache, GenerationState, jax.Array]:
    """Run a step that verifies draft tokens; return also the accepted ones, i32[W]."""
    active, places = state.active(cache), state.places
    processor = state.rows_of(choice.logits_processor)
    if processor is not None:
        processor = processor.advance_through(drafted.mask())
    check = _Check(state, choice.sampling, drafted, draft_logits, processor)
    cache, batch, chosen = _compute_draft_tokens(runner, cache, active, check)
    num_rows = batch.query_lengths
    state = count_step(cache, state, active, jnp.minimum(num_rows, 1))
    state = note_refusals(state, batch.status)
    before = gather(state.result.lengths, places.sequences)
    state = _append_accepted(cache, state, check, batch, chosen)
    made = gather(state.result.lengths, places.sequences) - before
    made = jnp.where(num_rows > 0, made, 0)
    cache = _keep(cache, batch, active, jnp.minimum(made, num_rows))
    accepted = jnp.maximum(made - 1, 0)
    result = state.result.add_counts(
        draft_tokens=jnp.sum(jnp.maximum(num_rows - 1, 0), dtype=jnp.int32),
        accepted_tokens=jnp.sum(accepted, dtype=jnp.int32),
        checking_steps=jnp.int32(1),
    )
    return cache, dataclasses.replace(state, result=result), accepted


class _Check(NamedTuple):
    """Inputs of a verification."""

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
    runner: Runner, cache: Cache, active: ActiveSequences, check: _Check
) -> tuple[Cache, Batch, _Chosen]:
    """Compute the newest token of each sequence and its draft tokens.

    The step, R rows, is planned for the most draft tokens; the model computes the first
    of them, as many as the smallest sufficient size.
    """
    state, drafted = check.state, check.drafted
    sizes, places = row_sizes(*drafted.tokens.shape), state.places
    is_ready = places.is_cached & places.is_running
    counts = jnp.where(is_ready, 1 + drafted.counts, 0)
    rows = DraftTokenRows.of(counts, sizes[-1])
    newest = state.newest(active)
    of_place = jnp.concatenate([newest[:, None], drafted.tokens], axis=1)
    tokens = gather(of_place, (rows.places, rows.before))
    seq_ids = jnp.where(is_ready, places.seq_ids, NO_SEQUENCE)
    has_states = cache.metadata.has_states
    cache, batch = append(
        cache,
        seq_ids,
        counts,
        capacity=sizes[-1],
        tokens=tokens,
        num_pending=jnp.where(has_states, drafted.counts, 0),
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
            found = check.choose(
                logits, DraftTokenRows(*(each[:size] for each in rows))
            )
            put = jax.tree.map(lambda old, new: old.at[:size].set(new), chosen, found)
            return cache, put

        return compute

    nothing = _Chosen(tokens, jnp.zeros(tokens.shape, jnp.float32))
    carry, size = (cache, nothing), choose_size(jnp.sum(counts), sizes)
    for i, num_rows in enumerate(sizes):
        carry = when(size == i, program(num_rows), carry, *leaves)
    return carry[0], batch, carry[1]


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


def _keep(
    cache: Cache, batch: Batch, active: ActiveSequences, kept: jax.Array
) -> Cache:
    """Truncate each sequence to its first `kept` rows, i32[W], and commit them."""
    lengths = active.done + kept
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
