"""The queue: seats waiting sequences in running places, strictly in order.

Preempted sequences come before new ones, which wait in a ring, the queue. The first
sequence that lacks a place or blocks holds back all behind it.

Samples of a prompt share its computation. The first sample, the *leader*, computes the
prompt; the others have places but wait until it is computed, then fork. If the last
cached sample finishes while others still need the prompt, its row is handed over to the
oldest sample with a place, or else to the *retained prompt*, a cache row without a
place. Samples without a place are first in the queue, so they belong to one prompt and
one retained prompt is enough.

Keys and values of a prompt are shared as long as one sample has them. A recurrent state
advances with the next token, so a copy is held at the end of the prompt.

Symbols: N sequences, Q prompts, W places, K lanes.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.scheduler.state import (
    ActiveSequences,
    GenerationState,
    Places,
    RetainedPrompt,
    find_oldest,
    sort_by_age,
)
from jkv.decoding.sequences import blocks
from jkv.decoding.sequences.blocks import Blocks
from jkv.decoding.sequences.results import FinishReason
from jkv.metadata import ring
from jkv.operations import (
    gather,
    running_sum,
    scatter,
    scatter_add,
    scatter_max,
    scatter_min,
    when,
)
from jkv.state import NO_SEQUENCE, Cache, Ring
from jkv.verbs.branching import fork


def make_queue(sequences: jax.Array, waiting: jax.Array) -> Ring:
    """Return a queue of the `waiting` sequences, bool[N], in the given order."""
    ids, bounds = jnp.zeros_like(sequences), jnp.zeros((8,), jnp.int32)
    return ring.push(Ring(ids=ids, bounds=bounds, indices=None), sequences, waiting)


def list_queue(queue: Ring) -> tuple[jax.Array, jax.Array]:
    """Return the queue in order, i32[N], and the mask of its entries, bool[N]."""
    rank = jnp.arange(queue.ids.shape[0], dtype=jnp.int32)
    return ring.peek(queue, rank), rank < queue.count


def drop_from_queue(queue: Ring, ended: jax.Array) -> Ring:
    """Remove finished sequences, bool[N], from the queue."""
    sequences, waits = list_queue(queue)
    return make_queue(sequences, waits & ~gather(ended, sequences))


def order_queue(queue: Ring, ranks: jax.Array) -> Ring:
    """Sort the queue by `ranks`, i32[N], stably."""
    sequences, waits = list_queue(queue)
    last = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(waits, gather(ranks, sequences), last), stable=True)
    return make_queue(gather(sequences, order), gather(waits, order))


class Candidates(NamedTuple):
    """The first K waiting sequences, in order, and their costs in blocks."""

    sequences: jax.Array  # i32[K], arbitrary past the last
    exists: jax.Array  # bool[K]
    is_fresh: jax.Array  # bool[K], never ran
    ended: jax.Array  # bool[K], finished while waiting, needs nothing
    costs: Blocks  # i32[K]; for a leader, the blocks of its whole sequence
    may_cost_less: jax.Array  # bool[K], a prefix cache hit may lower the cost


def find_waiting(
    places: Places,
    queue: Ring,  # sequences that never ran
    num_lanes: int,  # K, static
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the first three fields of `Candidates`."""
    lane = jnp.arange(num_lanes, dtype=jnp.int32)
    num_preempted = places.num_started - places.num_running
    fresh_rank = lane - num_preempted
    is_fresh = fresh_rank >= 0
    place = gather(sort_by_age(places), places.num_running + lane)
    fresh = ring.peek(queue, jnp.clip(fresh_rank, 0, queue.count))
    sequences = jnp.where(is_fresh, fresh, gather(places.sequences, place))
    return sequences, ~is_fresh | (fresh_rank < queue.count), is_fresh


class SeatedSequences(NamedTuple):
    """The outcome of seating K candidates."""

    seated: jax.Array  # bool[K], gets a place
    passed: jax.Array  # bool[K], leaves the queue: seated, or finished before


def choose_seated(
    candidates: Candidates,
    num_free_blocks: Blocks,  # i32[], blocks promised to no sequence
    num_free_places: jax.Array,  # i32[]
) -> SeatedSequences:
    """Seat all candidates before the first that does not fit."""
    alive = candidates.exists & ~candidates.ended
    costs = (jnp.where(alive, cost, 0) for cost in candidates.costs)
    ranks = running_sum(alive.astype(jnp.int32))
    fits = blocks.reach(num_free_blocks, tuple(map(running_sum, costs)))
    fits &= ranks <= num_free_places
    stops = ~candidates.exists | (alive & ~fits)
    passed = running_sum(stops.astype(jnp.int32)) == 0
    return SeatedSequences(passed & alive, passed)


def seat(
    places: Places, queue: Ring, candidates: Candidates, result: SeatedSequences
) -> tuple[Places, Ring]:
    """Move seated candidates into places: free ones, or their own if preempted."""
    rank = running_sum(result.seated.astype(jnp.int32)) - 1
    place = gather(sort_by_age(places), places.num_running + rank)
    place = jnp.where(result.seated, place, places.num_places)
    num_fresh = jnp.sum(result.seated & candidates.is_fresh, dtype=jnp.int32)
    num_left = jnp.sum(result.passed & candidates.is_fresh, dtype=jnp.int32)
    places = places._replace(
        sequences=scatter(places.sequences, place, candidates.sequences),
        num_running=places.num_running + rank[-1] + 1,
        num_started=places.num_started + num_fresh,
    )
    return places, ring.pop(queue, num_left)


class Attempt(NamedTuple):
    """Conditions under which seated sequences are admitted to the cache."""

    # bool[], the youngest is seated on trial: the prefix index may have enough of its
    # blocks, or no other sequence runs.
    is_trial: jax.Array
    keep_free: Blocks  # i32[], blocks promised to others, not used by a trial
    slack: Blocks  # i32[], free blocks promised to no sequence
    goes_on: jax.Array  # bool[], more sequences may be seated


def may_seat(state: GenerationState, slack: Blocks) -> jax.Array:
    """Return True if a waiting sequence may be seated, bool[]: a cheap test."""
    places = state.places
    waits = (places.num_started > places.num_running) | (state.queue.count > 0)
    has_place = places.num_running < state.most_running
    is_empty = places.num_running == 0
    return waits & has_place & (is_empty | blocks.reach(slack, state.seating_needs))


def seat_waiting(
    cache: Cache, state: GenerationState, num_lanes: int
) -> tuple[GenerationState, Attempt]:
    """Seat the first waiting sequences, at most K, which is static."""
    places, active = state.places, state.active(cache)
    promised = blocks.total(state.demand(cache, active))
    slack = blocks.subtract(blocks.count_free_blocks(cache), promised)
    num_free_places = state.most_running - places.num_running
    candidates = _find_candidates(cache, state, active, num_lanes)
    result = choose_seated(candidates, slack, num_free_places)
    num_passed = jnp.sum(result.passed, dtype=jnp.int32)
    is_refused = candidates.exists[0] & (num_passed == 0) & (num_free_places > 0)
    # Admission takes a lane.
    has_lane = jnp.sum(places.is_pending, dtype=jnp.int32) < num_lanes
    may_fit = candidates.may_cost_less[0] & blocks.reach(slack, state.seating_needs)
    is_trial = is_refused & has_lane & (may_fit | (places.num_running == 0))
    forced = is_trial & (jnp.arange(num_lanes, dtype=jnp.int32) == 0)
    result = SeatedSequences(result.seated | forced, result.passed | forced)
    places, queue = seat(places, state.queue, candidates, result)
    # The next candidate needs these blocks, unless a prefix cache hit lowers its cost.
    known = candidates.exists & ~candidates.may_cost_less
    needs = [jnp.where(known, cost, 0) for cost in candidates.costs]
    state = dataclasses.replace(
        state,
        places=places,
        queue=queue,
        seating_needs=tuple(gather(need, num_passed, fill=0) for need in needs),
    )
    is_tried_next = gather(candidates.may_cost_less, num_passed, fill=False)
    goes_on = is_trial | (num_passed == num_lanes) | (is_tried_next & (num_passed > 0))
    keep_free = tuple(jnp.where(is_trial, each, 0) for each in promised)
    return state, Attempt(is_trial, keep_free, slack, goes_on)


def _find_candidates(
    cache: Cache, state: GenerationState, active: ActiveSequences, num_lanes: int
) -> Candidates:
    waiting = find_waiting(state.places, state.queue, num_lanes)
    sequences, size = waiting[0], state.block_size(cache)
    ended = gather(state.result.reasons, sequences) != FinishReason.RUNNING
    prompt = jax.lax.div(sequences, jnp.int32(state.num_samples))
    prompt_lengths = gather(state.prompts.lengths, prompt)
    sequence_lengths = prompt_lengths + gather(state.result.lengths, sequences)
    whole_lengths = sequence_lengths
    if (shortening := state.shortening) is not None:
        whole_lengths = shortening.peak(prompt_lengths, sequence_lengths)
        sequence_lengths = shortening.slots(prompt_lengths, sequence_lengths)
        prompt_lengths = shortening.shared(prompt_lengths)
    costs, leads = blocks.of_tokens(whole_lengths, size), jnp.ones_like(ended)
    if state.kept is not None:
        costs = state.kept.costs(cache, sequences, whole_lengths, size)
    if state.num_samples > 1:
        # The first sample computes the prompt, unless the retained prompt has it.
        is_first = _is_first_sample(state, active, prompt, ended)
        is_held = state.retained.holds(prompt)
        beside = blocks.beside_prompt(prompt_lengths, sequence_lengths, size)
        held = blocks.subtract(costs, blocks.of_tokens(prompt_lengths, size))
        leads = is_first & ~is_held
        costs = tuple(
            jnp.where(leads, whole, jnp.where(is_first, rest, own))
            for whole, rest, own in zip(costs, held, beside, strict=True)
        )
    may_cost_less = leads & cache.metadata.index.is_there
    return Candidates(*waiting, ended, costs, may_cost_less)


def _is_first_sample(
    state: GenerationState, active: ActiveSequences, prompt: jax.Array, ended: jax.Array
) -> jax.Array:
    """Return True for the first candidate of each prompt, i32[K]; bool[K]."""
    lane = jnp.arange(prompt.shape[0], dtype=jnp.int32)
    is_before = (lane[None] < lane[:, None]) & ~ended[None]
    follows = jnp.any(is_before & (prompt[None] == prompt[:, None]), axis=1)
    is_running = state.places.is_running[None]
    joins = jnp.any(is_running & (active.prompts[None] == prompt[:, None]), axis=1)
    return ~(follows | joins)


def find_pending(
    state: GenerationState, active: ActiveSequences, has_states: bool
) -> tuple[jax.Array, jax.Array]:
    """Find the pending sequences that can be opened now.

    Returns:
      Leaders, bool[W]: the oldest sample of a prompt without a cached sample.
      Forks, bool[W]: samples of a prompt that is computed.
    """
    places, prompts, done = state.places, active.prompts, active.done
    if has_states:
        # Past the prompt's end the state is no longer the prompt's.
        done = jnp.where(done > active.prompt_lengths, -1, done)
    num_prompts = state.prompts.lengths.shape[0]
    pending = places.is_pending
    running = jnp.where(places.is_cached, prompts, num_prompts)
    most_done = jnp.full((num_prompts,), -1, jnp.int32)
    most_done = gather(scatter_max(most_done, running, done), prompts)
    is_held = state.retained.holds(prompts)
    oldest = jnp.full((num_prompts,), places.num_places, jnp.int32)
    waiting = jnp.where(pending, prompts, num_prompts)
    oldest = gather(scatter_min(oldest, waiting, places.ages), prompts)
    is_alone = (most_done < 0) & ~is_held
    leads = pending & is_alone & (places.ages == oldest)
    return leads, pending & ((most_done >= active.prompt_lengths) | is_held)


def find_hand_over(
    state: GenerationState,
    active: ActiveSequences,
    ended: jax.Array,  # bool[W], finished, still in their places
) -> tuple[jax.Array, jax.Array]:
    """Find the finished sequences with a prompt that other samples still need.

    Returns:
      bool[W], sequences to truncate rather than free.
      i32[W], the place that receives each prompt, W for the retained prompt.
    """
    places, prompts, unfinished = state.places, active.prompts, state.num_unfinished
    num_prompts, nothing = unfinished.shape[0], places.num_places
    stays = places.is_running & ~ended

    def of(mask: jax.Array) -> jax.Array:
        return jnp.where(mask, prompts, num_prompts)

    none = jnp.zeros((num_prompts,), jnp.int32)
    num_cached = scatter_add(none, of(stays & places.is_cached), 1)
    num_running = scatter_add(none, of(stays), 1)
    youngest = jnp.full((num_prompts,), nothing, jnp.int32)
    heir = scatter_min(youngest, of(stays & ~places.is_cached), places.ages)
    may_give = ended & places.is_cached & active.has_prompt
    giver = scatter_min(youngest, of(may_give), places.ages)

    is_last = (
        may_give
        & (gather(num_cached, prompts) == 0)
        & (places.ages == gather(giver, prompts))
    )
    has_heir = gather(heir, prompts) < nothing
    is_wanted = gather(unfinished, prompts) > gather(num_running, prompts)
    by_age = sort_by_age(places)
    receiver = gather(by_age, gather(heir, prompts), fill=nothing)
    return is_last & (has_heir | is_wanted), receiver


def has_more_samples(state: GenerationState, active: ActiveSequences) -> jax.Array:
    """Return True for prompts with samples that wait without a place, bool[Q]."""
    num_prompts = state.prompts.lengths.shape[0]
    of_place = jnp.where(state.places.is_running, active.prompts, num_prompts)
    seated = scatter_add(jnp.zeros((num_prompts,), jnp.int32), of_place, 1)
    return state.num_unfinished > seated


def find_unheld(cache: Cache, state: GenerationState) -> jax.Array:
    """Return places with a new prompt that samples without a place need, bool[W]."""
    places, retained, active = state.places, state.retained, state.active(cache)
    is_whole = places.is_cached & places.is_running
    is_whole &= active.done == active.prompt_lengths
    wanted = is_whole & gather(has_more_samples(state, active), active.prompts)
    return wanted & (retained.seq_id < 0)


def hold_prompt(cache: Cache, state: GenerationState) -> tuple[Cache, GenerationState]:
    """Fork a newly computed prompt if samples without a place wait for it.

    Keys and values of a prompt are shared anyway; recurrent states are not.
    """
    places, wanted = state.places, find_unheld(cache, state)

    def hold(carry: tuple[Cache, RetainedPrompt]) -> tuple[Cache, RetainedPrompt]:
        cache, _ = carry
        place = find_oldest(places, wanted, 1)
        parent = gather(places.seq_ids, place, fill=NO_SEQUENCE)
        cache, forked = fork(cache, parent)
        prompt = state.active(cache).prompts[place[0]]
        return cache, RetainedPrompt(forked.seq_ids[0], prompt)

    held = cache, state.retained
    cache, retained = when(jnp.any(wanted), hold, held)
    return cache, dataclasses.replace(state, retained=retained)
