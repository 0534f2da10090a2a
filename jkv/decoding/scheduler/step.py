"""One step of continuous batching: compute rows, choose tokens, schedule the next step.

A step gives at least one row to every cached sequence, computes the rows and chooses a
token for each sequence whose last token was among them. It then prepares the places of
the next step: release finished sequences, preempt the youngest if blocks run out, admit
waiting ones.

Symbols: N sequences, W places, R rows of a step, V vocabulary size.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.model.drafter import Follower
from jkv.decoding.model.runner import (
    Runner,
    choose_size,
    end_at_snapshots,
    locate_rows,
    share_rows,
)
from jkv.decoding.sampling.draws import Choice
from jkv.decoding.sampling.next_token import Progress, choose_next
from jkv.decoding.scheduler.admission import admit
from jkv.decoding.scheduler.hidden import HiddenRows, follow
from jkv.decoding.scheduler.queue import find_unheld, hold_prompt, may_seat
from jkv.decoding.scheduler.release import (
    find_ended,
    leave_ended,
    release_and_preempt,
)
from jkv.decoding.scheduler.state import ActiveSequences, GenerationState
from jkv.decoding.sequences.blocks import (
    count_free_blocks,
    count_used_blocks,
    reach,
    subtract,
    total,
)
from jkv.decoding.sequences.results import FinishReason, Generation
from jkv.operations import gather, scatter, when, while_loop
from jkv.state import NO_SEQUENCE, Cache
from jkv.status import Status
from jkv.verbs.attending import plan_attention
from jkv.verbs.writing import commit


class Computed(NamedTuple):
    """Logits, status and row count of each place after a step."""

    logits: jax.Array  # f32[W, V], after the place's last row; arbitrary without a row
    status: jax.Array  # i32[W], status of the append
    num_rows: jax.Array  # i32[W], rows computed
    # f32[W, A], auxiliary hidden states of each place's last row; None without.
    hidden: jax.Array | None


def advance(
    runner: Runner,
    cache: Cache,
    state: GenerationState,
    choice: Choice,  # of N sequences
    logits: jax.Array,  # f32[W, V], of the last step; the buffer is reused
    hidden: HiddenRows | None = None,  # for a drafter with auxiliary layers
) -> tuple[Cache, GenerationState, jax.Array, HiddenRows | None]:
    """Compute the rows of a step and choose a token for each complete sequence."""
    if state.shortening is not None:
        cache, state = _make_room(cache, state)
    active, places = state.active(cache), state.places
    left, has_spans = active.count_left(places), state.prompts.spans is not None
    least = state.count_least(active) if has_spans else None
    counts = share_rows(left, places.ages, state.row_counts[-1], least)
    shorter = end_at_snapshots(cache, active.done, counts, left, state.divergence)
    counts = state.end_at_spans(active, shorter, counts) if has_spans else shorter
    if state.shortening is not None:
        counts = state.shortening.limit(
            counts, active.done, active.prompt_lengths, active.slots
        )
    follower = None
    if runner.drafter is not None:
        follower = follow(runner.drafter, hidden, state, active)
    cache, computed = _compute_rows(
        runner, cache, state, active, counts, logits, follower
    )
    if hidden is not None:
        rows = computed.hidden
        if rows is None:  # a step without the drafter
            rows = jnp.zeros_like(hidden.rows)
        hidden = hidden.note(state, active, computed.num_rows, rows)
    state = count_step(cache, state, active, computed.num_rows)
    state = note_refusals(state, computed.status)
    is_whole = active.done + computed.num_rows == active.sequence_lengths
    is_ready = (computed.num_rows > 0) & is_whole
    if state.shortening is not None:
        ends = active.done + computed.num_rows == active.prompt_lengths
        ends &= computed.num_rows > 0
        cache = state.shortening.press_prompts(cache, places.seq_ids, ends)
    state, logits = choose_tokens(cache, state, computed.logits, is_ready, choice)
    return cache, state, logits, hidden


def _make_room(cache: Cache, state: GenerationState) -> tuple[Cache, GenerationState]:
    """Roll full sequences; end those that lack a block for it with CONTEXT_FULL."""
    seq_ids, result = state.places.seq_ids, state.result
    cache, refused = state.shortening.make_room(cache, seq_ids)
    num_sequences = result.reasons.shape[0]
    ended = jnp.where(refused, state.places.sequences, num_sequences)
    reasons = scatter(result.reasons, ended, jnp.int32(FinishReason.CONTEXT_FULL))
    return cache, dataclasses.replace(state, result=result._replace(reasons=reasons))


def schedule(cache: Cache, state: GenerationState) -> tuple[Cache, GenerationState]:
    """Choose the sequences of the next step: release, preempt, admit.

    Sequences that were open before the loop have places and keep their blocks.
    """
    if state.before is not None:
        return cache, leave_ended(state)
    demand = state.demand(cache, state.active(cache))
    slack = subtract(count_free_blocks(cache), total(demand))
    ended, is_unwanted = find_ended(state)
    lacks_blocks = ~reach(slack, jax.tree.map(jnp.zeros_like, slack))
    is_due = jnp.any(ended) | is_unwanted | lacks_blocks
    is_due |= jnp.any(state.places.is_pending) | may_seat(state, slack)
    holds_prompts = cache.metadata.has_states and state.num_samples > 1
    if holds_prompts:
        is_due |= jnp.any(find_unheld(cache, state))
    Carry = tuple[Cache, GenerationState]

    def reschedule(carry: Carry, *demand: jax.Array) -> Carry:
        cache, state, slack = release_and_preempt(*carry, demand)
        if holds_prompts:
            cache, state = hold_prompt(cache, state)
        return admit(cache, state, slack)

    # In most steps the same sequences go on.
    return when(is_due, reschedule, (cache, state), *demand)


def _compute_rows(
    runner: Runner,
    cache: Cache,
    state: GenerationState,
    active: ActiveSequences,
    counts: jax.Array,  # i32[W]
    logits: jax.Array,  # f32[W, V], buffer for the new logits
    follower: Follower | None,  # a drafter to update
) -> tuple[Cache, Computed]:
    """Compute `counts` rows of each place, i32[W], in the smallest sufficient step."""
    places, num_places = state.places, counts.shape[0]
    sizes, work = state.row_counts, jnp.sum(counts, dtype=jnp.int32)
    may_decode = num_places in sizes and runner.exact is None
    # With at most one row per sequence, row i belongs to place i; a place without one
    # has a row of padding.
    is_decoding = jnp.asarray(may_decode) & jnp.all(counts <= 1)
    if may_decode:
        is_decoding &= choose_size(work, sizes) == sizes.index(num_places)
    rows = jnp.where(is_decoding, 1, counts)
    seq_ids = jnp.where(counts > 0, places.seq_ids, NO_SEQUENCE)
    located = locate_rows(rows, active.done, sizes[-1])
    tokens, spans = state.tokens_at(*located), state.prompts.spans
    mask = None if spans is None else state.mask_rows(active, *located)
    max_span = None if spans is None else spans.bound(sizes[-1])

    # Append once, for the most rows. The model computes the smallest sufficient number
    # of them, and each size has a plan of its own.
    cache, batch, tokens = runner.append(
        cache, seq_ids, tokens, rows, mask=mask, max_span=max_span
    )
    batch = dataclasses.replace(batch, plan=None)
    leaves, structure = jax.tree.flatten((tokens, batch))
    Carry = tuple[Cache, jax.Array, jax.Array | None]

    def program(num_rows: int, *, decodes: bool) -> Callable[..., Carry]:
        def compute(carry: Carry, *leaves: jax.Array) -> Carry:
            tokens, batch = jax.tree.unflatten(structure, leaves)
            first = dataclasses.replace(batch.first_rows(num_rows), is_decoding=decodes)
            if decodes:  # single rows are causal
                first = dataclasses.replace(first, mask=None)
            first = plan_attention(carry[0], first)
            if follower is not None:
                return runner.compute_followed(
                    carry[0], first, tokens[:num_rows], follower
                )
            cache, logits = runner.compute(carry[0], first, tokens[:num_rows])
            return cache, logits[:num_places], None

        return compute

    # `decode` serves steps of one row per place. Other steps with as few rows take the
    # next size: they are rare, and each size is a copy of the model.
    others = sizes
    if may_decode and num_places in (1, *sizes[:-1]):
        others = tuple(num_rows for num_rows in sizes if num_rows != num_places)

    def compute_one(carry: Carry, size: jax.Array, *leaves: jax.Array) -> Carry:
        for i, num_rows in enumerate(others):
            num_rows = num_rows if runner.exact is None else tokens.shape[0]
            compute = program(num_rows, decodes=False)
            if len(others) == 1:
                return compute(carry, *leaves)
            carry = when(size == i, compute, carry, *leaves)
        return carry

    # One `when` per program: `lax.switch` would copy the pool.
    before = None if follower is None else follower.previous
    carry, has_work = (cache, logits, before), work > 0
    if may_decode:
        decode = program(num_places, decodes=True)
        carry = when(is_decoding & has_work, decode, carry, *leaves)
    if others:
        size = choose_size(work, others)
        carry = when(~is_decoding & has_work, compute_one, carry, size, *leaves)
    cache, logits, hidden = carry
    cache, batch = commit(cache, batch), batch.first_requests(num_places)
    return cache, Computed(logits, batch.status, batch.query_lengths, hidden)


def choose_tokens(
    cache: Cache,
    state: GenerationState,
    logits: jax.Array,  # f32[W, V], after the last token of each place
    is_ready: jax.Array,  # bool[W], the logits are valid
    choice: Choice,  # of N sequences
) -> tuple[GenerationState, jax.Array]:  # f32[W, V], processed logits
    """Choose the next token of each sequence that is complete in the cache."""
    places, lengths = state.places, state.result.lengths
    sequences = jnp.where(is_ready, places.sequences, lengths.shape[0])
    progress = state.progress(cache)
    result, tokens, processor = choose_next(
        progress, logits, sequences, state.seen, choice
    )
    if state.num_samples > 1:
        is_first = is_ready & (gather(lengths, places.sequences) == 0)
        progress = progress._replace(result=result)
        result = _choose_for_samples(progress, state, logits, is_first, choice)
    state = dataclasses.replace(state, result=result)
    return note_seen(state, is_ready, tokens), processor


def note_seen(
    state: GenerationState, is_ready: jax.Array, tokens: jax.Array
) -> GenerationState:
    """Record `tokens`, i32[W] or i32[W, C], as seen where `is_ready`, bool[...]."""
    place = jnp.arange(state.places.num_places, dtype=jnp.int32)
    place = place.reshape(-1, *(1,) * (tokens.ndim - 1))
    token = jnp.where(is_ready, tokens, state.seen.shape[1])
    seen = scatter(state.seen, (place, token), True)
    return dataclasses.replace(state, seen=seen)


def _choose_for_samples(
    progress: Progress,
    state: GenerationState,
    logits: jax.Array,
    is_first: jax.Array,
    choice: Choice,
) -> Generation:
    """Choose the first tokens of all samples of complete prompts, bool[W].

    Samples that still wait get theirs too, so that no logits have to be kept.
    """
    num_samples, num_sequences = state.num_samples, state.result.lengths.shape[0]
    Carry = tuple[jax.Array, Generation]

    def trip(carry: Carry) -> Carry:
        todo, result = carry
        place = jnp.argmax(todo)
        leader = gather(state.places.sequences, place)
        sample_index = jnp.arange(num_samples, dtype=jnp.int32)
        sequences = (
            jax.lax.div(leader, jnp.int32(num_samples)) * num_samples + sample_index
        )
        before = progress._replace(result=result)
        is_open = gather(before.is_running, sequences) & (
            gather(result.lengths, sequences) == 0
        )
        is_open &= sequences != leader
        chosen = jnp.where(is_open, sequences, num_sequences)

        def spread(row: jax.Array) -> jax.Array:
            return jnp.broadcast_to(row[None], (num_samples, row.shape[0]))

        rows, seen = spread(gather(logits, place)), spread(gather(state.seen, place))
        result, *_ = choose_next(before, rows, chosen, seen, choice)
        return todo.at[place].set(False), result

    carry = is_first, progress.result
    return while_loop(lambda carry: jnp.any(carry[0]), trip, carry)[1]


def note_refusals(
    state: GenerationState,
    status: jax.Array,  # i32[W], status of the append
) -> GenerationState:
    """Finish sequences freed by the caller, or out of blocks while alone."""
    result, places = state.result, state.places
    is_gone = status == Status.INVALID_SEQUENCE
    lacks_blocks = status == Status.OUT_OF_BLOCKS
    if state.before is None:
        # If others run, the youngest is preempted and this sequence waits for blocks.
        lacks_blocks &= (places.num_running == 1) & (state.retained.seq_id < 0)
    refused = is_gone | lacks_blocks
    cause = jnp.where(is_gone, FinishReason.CANCELLED, FinishReason.OUT_OF_BLOCKS)
    sequence = jnp.where(refused, places.sequences, result.reasons.shape[0])
    reasons = scatter(result.reasons, sequence, cause.astype(jnp.int32))
    return dataclasses.replace(state, result=result._replace(reasons=reasons))


def count_step(
    cache: Cache,
    state: GenerationState,
    active: ActiveSequences,
    rows: jax.Array,  # i32[W], computed in this step
) -> GenerationState:
    """Update the statistics after the append of a step and before its releases."""
    places, old = state.places, state.result.statistics
    served = rows > 0
    of_prompt = jnp.clip(active.prompt_lengths - active.done, 0, rows)
    # Of the generated tokens only the newest is computed for the first time.
    is_new = (active.done + rows == active.sequence_lengths) & (of_prompt < rows)
    again = rows - of_prompt - is_new.astype(jnp.int32)
    num_served = jnp.sum(served, dtype=jnp.int32)
    waits = (state.queue.count > 0) | (places.num_started > places.num_running)
    is_step = (num_served > 0).astype(jnp.int32)
    waits_now = waits.astype(jnp.int32) * is_step
    used = count_used_blocks(cache)
    length = jnp.where(places.is_cached, active.slots + rows, 0)
    num_groups = len(cache.metadata.block_numbers)
    empty = num_groups * jnp.sum(-length % cache.block_size, dtype=jnp.int32)
    is_peak = (used > old.peak_blocks) & (num_served > 0)
    result = state.result.add_counts(
        num_steps=is_step,
        sequence_steps=num_served,
        prompt_tokens=jnp.sum(of_prompt, dtype=jnp.int32),
        recomputed_tokens=jnp.sum(again, dtype=jnp.int32),
        queue_steps=waits_now,
        idle_places=waits_now * (state.most_running - num_served),
        peak_blocks=jnp.where(is_peak, used - old.peak_blocks, 0),
        empty_slots=jnp.where(is_peak, empty - old.empty_slots, 0),
    )
    return dataclasses.replace(state, result=result)
