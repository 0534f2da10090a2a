"""Rounds of beam search: compute prompts, branch, finish.

Running searches advance together, each beam with the same number of new tokens. If the
cache has no room for all, the last ones wait until the others have finished: a round
runs the searches with room, in one loop over prompts and one over steps.

Symbols: Q prompts, K beams of each, V vocabulary size.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.beams import branches
from jkv.decoding.beams.branches import SearchState
from jkv.decoding.beams.hypotheses import (
    NO_SCORE,
    Beams,
    Continuations,
    Hypotheses,
    Rules,
    choose_running,
    keep_ended,
    may_improve,
    rank_continuations,
)
from jkv.decoding.model.runner import Chunk, ChunkSizes, Runner, Unread, run_chunks
from jkv.decoding.sampling.next_token import (
    ProcessorRows,
    all_rows,
    begin_rows,
    find_first,
    is_nothing_left,
)
from jkv.decoding.sequences.blocks import BlockSize, count_cached
from jkv.decoding.sequences.results import FinishReason
from jkv.logits_processors import LogitsProcessor
from jkv.operations import divide, gather, when, while_loop
from jkv.state import Cache

Carry = tuple[Cache, SearchState, jax.Array]


class Searcher(NamedTuple):
    """Constants of a call."""

    runner: Runner
    rules: Rules
    num_rows: int  # of a step with prompts
    vocabulary: int
    size: BlockSize  # blocks of a prompt while it is computed
    logits_processor: LogitsProcessor | None

    def rows_of(self, state: SearchState, parents: jax.Array) -> ProcessorRows | None:
        """Return the logits processor's rows of beams, i32[Q, C], or None."""
        if self.logits_processor is None:
            return None
        num_prompts, num_beams = state.seq_ids.shape
        prompt = jnp.arange(num_prompts, dtype=jnp.int32)[:, None]
        whole = all_rows(
            self.logits_processor, state.prompts, state.processor_state, num_beams
        )
        return whole.pick(prompt * num_beams + parents)


def run_round(
    searcher: Searcher, cache: Cache, state: SearchState
) -> tuple[Cache, SearchState]:
    """Run the searches with room, from their prompts to their end."""
    cache, state = branches.open_prompts(
        cache, _begin_anew(searcher, state), searcher.size
    )
    shape = *state.reasons.shape, searcher.vocabulary
    carry = cache, state, jnp.zeros(shape, jnp.float32)
    if searcher.size.is_reserved:
        cache, state, logits = _compute_prompts(searcher, *carry)
    else:
        cache, state, logits = _compute_prompts_that_fit(searcher, *carry)
    cache, state = branches.fork_prompts(cache, state)
    state = branches.count_blocks(cache, state)
    # Beams without tokens are equal: only the first has a score.
    logits = jnp.repeat(logits, state.num_beams, axis=0)
    cache, state, _ = while_loop(
        lambda carry: jnp.any(carry[1].is_running),
        lambda carry: _run_step(searcher, *carry),
        (cache, state, logits),
    )
    return cache, state


def _compute_prompts(
    searcher: Searcher, cache: Cache, state: SearchState, logits: jax.Array
) -> Carry:
    """Compute prompts as far as blocks suffice; return also logits, f32[Q, V]."""
    prompts = state.prompts
    Kept = tuple[SearchState, jax.Array]

    def find_tokens(prompt: jax.Array, position: jax.Array) -> jax.Array:
        return jnp.maximum(gather(prompts.tokens, (prompt, position)), 0)

    def note(_: Cache, kept: Kept, chunk: Chunk) -> Kept:
        state, logits = kept
        logits = jnp.where(chunk.is_whole[:, None], chunk.logits, logits)
        return state.count(num_steps=jnp.int32(1)), logits

    cache, (state, logits) = run_chunks(
        searcher.runner,
        cache,
        Unread(state.first_seq_ids, find_tokens),
        (state, logits),
        ChunkSizes(searcher.num_rows),
        count_left=lambda _, done: prompts.lengths - done,
        note=note,
    )
    return cache, state, logits


def _compute_prompts_that_fit(
    searcher: Searcher, cache: Cache, state: SearchState, logits: jax.Array
) -> Carry:
    """Compute partly reserved prompts; preempt the last search if blocks run out.

    The reservation counts on blocks released by a sliding window, which other sequences
    may still share.
    """

    def lacks(cache: Cache, state: SearchState) -> jax.Array:
        seq_ids = state.first_seq_ids
        done = count_cached(cache, seq_ids)
        return jnp.any((seq_ids >= 0) & (done < state.prompts.lengths))

    def let_wait(carry: tuple[Cache, SearchState]) -> tuple[Cache, SearchState]:
        cache, state, lacking = branches.let_last_wait(*carry, jnp.zeros((), bool))
        return cache, state.end(lacking != FinishReason.RUNNING, lacking)

    def trip(carry: Carry) -> Carry:
        cache, state, logits = _compute_prompts(searcher, *carry)
        cache, state = when(lacks(cache, state), let_wait, (cache, state))
        return cache, state, logits

    cache, state, logits = while_loop(
        lambda carry: lacks(*carry[:2]), trip, (cache, state, logits)
    )
    none = tuple(jnp.zeros_like(state.reasons) for _ in cache.metadata.block_numbers)
    return *branches.make_room_for_forks(cache, state, none), logits


def _begin_anew(searcher: Searcher, state: SearchState) -> SearchState:
    """Reset searches that waited."""
    sizes = state.beams.tokens.shape
    return dataclasses.replace(
        state,
        beams=Beams.fresh(*sizes),
        hypotheses=_where(state.is_open, Hypotheses.none(*sizes), state.hypotheses),
        length=jnp.zeros((), jnp.int32),
        processor_state=begin_rows(
            searcher.logits_processor, state.prompts, state.num_beams
        ),
    )


def _run_step(
    searcher: Searcher, cache: Cache, state: SearchState, logits: jax.Array
) -> Carry:
    """Add a token to each beam, from logits f32[Q * K, V], and compute it."""
    before = state
    state, parents, reasons = _choose_beams(searcher, cache, state, logits)
    ends = reasons != FinishReason.RUNNING
    cache = branches.free_beams(cache, before, ends & before.is_running)
    state = state.end(ends, reasons)
    cache, state = branches.follow_parents(cache, state, parents)

    # All beams of a prompt have one length, so all or none need a block.
    _, tail = divide(state.prompts.lengths + state.length - 1, cache.block_size)
    needs = jnp.where(tail == 0, jnp.int32(state.num_beams), 0)
    cache, state, lacking = branches.make_room_for_beams(
        cache,
        state,
        (needs,) * len(cache.metadata.block_numbers),
        jnp.zeros_like(needs),
    )
    lacks = lacking != FinishReason.RUNNING
    state = _count_beams_as_they_are(searcher.rules, state, lacks).end(lacks, lacking)
    return when(
        jnp.any(state.is_running),
        lambda carry: _compute_beams(searcher, *carry),
        (cache, state, logits),
    )


def _choose_beams(
    searcher: Searcher, cache: Cache, state: SearchState, logits: jax.Array
) -> tuple[SearchState, jax.Array, jax.Array]:
    """Choose the next tokens; return also parents, i32[Q, K], and finish reasons."""
    rules, logprobs = searcher.rules, _find_logprobs(searcher, state, logits)
    # With NaN logits the search ends with its current beams.
    is_nan = jnp.any(jnp.isnan(logprobs), axis=(1, 2)) & state.is_running
    state = _count_beams_as_they_are(rules, state, is_nan)
    found = rank_continuations(
        jnp.where(is_nan[:, None, None], jnp.float32(NO_SCORE), logprobs),
        state.beams.scores,
        rules.num_candidates,
    )

    is_stuck = _find_stuck(searcher, state, found)
    for _, stuck in is_stuck:
        state = _count_beams_as_they_are(rules, state, stuck)
    length = state.length + 1
    is_past_context = state.prompts.lengths + length > cache.max_context_length
    is_last = is_past_context | (length >= rules.max_new_tokens)
    is_stop = jnp.any(found.tokens[:, :, None] == rules.stop_tokens[None, None], axis=2)
    processor = searcher.rows_of(state, found.parents)
    if processor is not None:
        has_ended = processor.advance(found.tokens.reshape(-1)).has_ended()
        if has_ended is not None:
            is_stop |= has_ended.reshape(is_stop.shape)
    is_final = is_stop | is_last[:, None]

    ended = keep_ended(state.hypotheses, state.beams, found, is_final, length, rules)
    hypotheses = _where(state.is_running & ~is_nan, ended, state.hypotheses)
    running = choose_running(found, is_final, state.num_beams)
    improves = may_improve(hypotheses, running.scores[:, 0], length, rules)
    reasons = find_first(
        is_nan.shape,
        [
            (FinishReason.NAN_LOGITS, is_nan),
            *is_stuck,
            (FinishReason.STOP, ~improves & ~is_last),
            (FinishReason.LENGTH, is_last & ~is_past_context),
            (FinishReason.CONTEXT_FULL, is_last),
        ],
    )
    state = dataclasses.replace(
        state,
        beams=state.beams.choose(running, length),
        hypotheses=hypotheses,
        length=length,
        processor_state=_advance(searcher, state, running),
    )
    reasons = jnp.where(state.is_running, reasons, jnp.int32(FinishReason.RUNNING))
    return state, running.parents, reasons


def _find_logprobs(
    searcher: Searcher, state: SearchState, logits: jax.Array
) -> jax.Array:
    """Return log-probabilities, f32[Q, K, V], -inf for beams with all tokens masked."""
    shape = *state.seq_ids.shape, logits.shape[1]
    beam = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape[:2])
    processor = searcher.rows_of(state, beam)
    if processor is None:
        return jax.nn.log_softmax(logits).reshape(shape)
    logits = processor.process(logits)
    is_refused = is_nothing_left(logits)[:, None]
    logprobs = jnp.where(is_refused, -jnp.inf, jax.nn.log_softmax(logits))
    return logprobs.reshape(shape)


def _find_stuck(
    searcher: Searcher, state: SearchState, found: Continuations
) -> list[tuple[FinishReason, jax.Array]]:
    """Return searches without hypotheses and without a beam to continue, bool[Q]."""
    if searcher.logits_processor is None:
        return []
    goes_on = jnp.any(found.scores > NO_SCORE, axis=1)
    has_found = jnp.any(state.hypotheses.scores > NO_SCORE, axis=1)
    stuck = state.is_running & ~goes_on & ~has_found
    return [(FinishReason.NOTHING_ALLOWED, stuck)]


def _advance(searcher: Searcher, state: SearchState, running: Continuations) -> Any:
    """Return the state of the logits processor for the running beams."""
    processor = searcher.rows_of(state, running.parents)
    return processor and processor.advance(running.tokens.reshape(-1)).state


def _compute_beams(
    searcher: Searcher, cache: Cache, state: SearchState, logits: jax.Array
) -> Carry:
    """Compute the newest token of each beam; the old logits are f32[Q * K, V]."""
    tokens = state.beams.tokens[:, :, state.length - 1].reshape(-1)
    tokens = jnp.maximum(tokens, 0)
    cache, _, logits = searcher.runner.run(cache, state.flat_seq_ids, tokens)
    state = branches.count_blocks(cache, state.count(num_steps=jnp.int32(1)))
    return cache, state, logits


def _count_beams_as_they_are(
    rules: Rules, state: SearchState, ends: jax.Array
) -> SearchState:
    """Add the beams of searches that end, bool[Q], to their hypotheses."""
    length = state.length
    scores = rules.penalise(state.beams.scores, jnp.maximum(length, 1))
    counts = ends[:, None] & (length > 0)
    hypotheses = state.hypotheses.add(
        state.beams.tokens, jnp.where(counts, scores, jnp.float32(NO_SCORE)), length
    )
    return dataclasses.replace(
        state, hypotheses=_where(ends, hypotheses, state.hypotheses)
    )


def _where(mask: jax.Array, new: Hypotheses, old: Hypotheses) -> Hypotheses:
    """Select new hypotheses for prompts in `mask`, bool[Q], old ones for others."""

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return jax.tree.map(pick, new, old)
