"""Admission: opens cache rows for sequences that have running places.

A sequence that computes its prompt allocates a row; one that shares it forks.

Symbols: K lanes, Q prompts, W places.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.sampling.next_token import find_first
from jkv.decoding.scheduler.queue import (
    Attempt,
    find_pending,
    has_more_samples,
    may_seat,
    seat_waiting,
)
from jkv.decoding.scheduler.state import (
    LANES,
    GenerationState,
    Holder,
    Loads,
    find_oldest,
    note_texts,
)
from jkv.decoding.texts.blocks import Blocks
from jkv.decoding.texts.prompts import find_texts
from jkv.decoding.texts.results import FinishReason
from jkv.indexing import gather, scatter
from jkv.sharding.loops import while_loop
from jkv.state import NO_SEQUENCE, Cache
from jkv.status import Status
from jkv.verbs.allocation import allocate
from jkv.verbs.forking import fork


def admit(
    cache: Cache, state: GenerationState, slack: Blocks
) -> tuple[Cache, GenerationState]:
    """Admit waiting sequences, in order, as long as they fit."""
    num_lanes = min(LANES, state.places.num_places)
    Carry = tuple[Cache, GenerationState, jax.Array]

    def trip(carry: Carry) -> Carry:
        cache, state, _ = carry
        state, attempt = seat_waiting(cache, state, num_lanes)
        return _open_seated(cache, state, attempt, num_lanes)

    begins = may_seat(state, slack) | jnp.any(state.places.is_pending)
    cache, state, _ = while_loop(lambda carry: carry[2], trip, (cache, state, begins))
    return cache, state


class _Lanes(NamedTuple):
    """At most K places to open in the cache, oldest first."""

    places: jax.Array  # i32[K], padded with W
    sequences: jax.Array  # i32[K]
    prompts: jax.Array  # i32[K]
    leads: jax.Array  # bool[K], computes its prompt
    forks: jax.Array  # bool[K], shares its prompt


def _open_seated(
    cache: Cache, state: GenerationState, attempt: Attempt, num_lanes: int
) -> tuple[Cache, GenerationState, jax.Array]:
    """Open rows for at most K seated sequences; return also bool[], more may follow."""
    loads = state.loads(cache)
    has_states = cache.metadata.has_states
    lanes, is_more = _find_lanes(state, loads, num_lanes, has_states)
    texts, lengths = find_texts(state.prompts, state.result, lanes.sequences)
    if state.prompts.spans is not None:
        texts = state.prompts.spans.cut_before(texts, lanes.prompts)
    salts = gather(state.prompts.salts, lanes.prompts)
    if state.shortening is not None:
        prompt_lengths = gather(state.prompts.lengths, lanes.prompts)
        lengths = state.shortening.peak(prompt_lengths, lengths)
        texts = state.shortening.findable(texts, prompt_lengths)
    partings = cache.metadata.index.find_partings(cache.metadata, texts, salts)
    cache, opened = allocate(
        cache,
        jnp.where(lanes.leads, lengths, NO_SEQUENCE),
        tokens=texts,
        salts=salts,
        keep_free=attempt.keep_free,
    )
    seq_ids, holder = opened.seq_ids, state.holder
    if state.num_samples > 1:
        cache, forked, holder = _fork_prompts(cache, state, loads, lanes)
        seq_ids = jnp.where(lanes.leads, seq_ids, forked)
    state = _give_up(state, attempt, lanes, opened.status, seq_ids)
    state = dataclasses.replace(state, holder=holder)
    state = _note_opened(state, lanes, seq_ids, opened.num_cached, partings)
    return cache, state, attempt.goes_on | (is_more & jnp.any(seq_ids >= 0))


def _find_lanes(
    state: GenerationState, loads: Loads, num_lanes: int, has_states: bool
) -> tuple[_Lanes, jax.Array]:
    """Return the places to open, and bool[], True if there are more than K."""
    places = state.places
    leads = places.is_pending
    forks = jnp.zeros_like(leads)
    if state.num_samples > 1:
        leads, forks = find_pending(state, loads, has_states)
    can_open = leads | forks
    lanes = find_oldest(places, can_open, num_lanes)
    found = _Lanes(
        places=lanes,
        sequences=gather(places.sequences, lanes),
        prompts=gather(loads.prompts, lanes),
        leads=gather(leads, lanes, fill=False),
        forks=gather(forks, lanes, fill=False),
    )
    return found, jnp.sum(can_open, dtype=jnp.int32) > num_lanes


def _fork_prompts(
    cache: Cache, state: GenerationState, loads: Loads, lanes: _Lanes
) -> tuple[Cache, jax.Array, Holder]:
    """Fork prompts from sequences that have them; the last fork takes the held row.

    Returns:
      The cache; i32[K], the rows of the forks, -1 if refused; and the holder.
    """
    places, holder = state.places, state.holder
    has_prompt, may_take = loads.has_prompt, jnp.bool_(True)
    if cache.metadata.has_states:
        # A state cannot be truncated: the prompt stays held while samples wait for it.
        has_prompt = loads.done == loads.prompt_lengths
        may_take = ~gather(has_more_samples(state, loads), lanes.prompts)
    is_source = (
        (places.is_cached & has_prompt)[None]
        & (loads.prompts[None] == lanes.prompts[:, None])
        & lanes.forks[:, None]
    )
    has_source = jnp.any(is_source, axis=1)
    source = gather(places.seq_ids, jnp.argmax(is_source, axis=1))
    is_held = lanes.forks & ~has_source & holder.holds(lanes.prompts)
    takes = is_held & may_take & (jnp.cumsum(is_held, dtype=jnp.int32) == 1)
    parents = jnp.where(is_held & ~takes, holder.seq_id, NO_SEQUENCE)
    parents = jnp.where(has_source, source, parents)
    prompt_lengths = gather(state.prompts.lengths, lanes.prompts)
    if state.shortening is not None:
        prompt_lengths = state.shortening.shared(prompt_lengths)
    cache, forked = fork(cache, parents, prompt_lengths)
    seq_ids = jnp.where(takes, holder.seq_id, forked.seq_ids)
    left = jnp.where(jnp.any(takes), NO_SEQUENCE, holder.seq_id)
    return cache, seq_ids, holder._replace(seq_id=left)


def _note_opened(
    state: GenerationState,
    lanes: _Lanes,
    seq_ids: jax.Array,
    num_cached: jax.Array,
    partings: jax.Array | None,
) -> GenerationState:
    """Record the cache rows given to places, i32[K], -1 for none."""
    place = jnp.where(seq_ids >= 0, lanes.places, state.places.num_places)
    if partings is not None and state.partings is not None:
        noted = scatter(state.partings, place, partings)
        state = dataclasses.replace(state, partings=noted)
    result = state.result.add_counts(cached_tokens=jnp.sum(num_cached, dtype=jnp.int32))
    # Count prompt tokens only: a preempted sequence finds generated tokens cached too.
    begins = (seq_ids >= 0) & (gather(result.lengths, lanes.sequences) == 0)
    begun = jnp.where(begins, lanes.sequences, result.lengths.shape[0])
    state = dataclasses.replace(
        state,
        places=state.places._replace(
            seq_ids=scatter(state.places.seq_ids, place, seq_ids)
        ),
        result=result._replace(
            cached_tokens=scatter(result.cached_tokens, begun, num_cached)
        ),
    )
    return note_texts(state, place)


def _give_up(
    state: GenerationState,  # before the rows were opened
    attempt: Attempt,  # conditions of the admission
    lanes: _Lanes,
    status: jax.Array,  # i32[K], status of the leaders' allocation
    seq_ids: jax.Array,  # i32[K], the opened rows
) -> GenerationState:
    """Unseat a failed trial; finish a sequence that cannot start even alone."""
    places, result = state.places, state.result
    is_alone = ~jnp.any(places.is_cached) & ~jnp.any(seq_ids >= 0)
    refused = lanes.leads & (status != Status.OK)
    ages = gather(places.ages, lanes.places, fill=-1)
    is_tried = attempt.is_trial & (ages == places.num_running - 1)
    unseats = jnp.any(is_tried & refused) & ~is_alone
    reason = find_first(
        (),
        [
            (FinishReason.OUT_OF_SEQUENCES, status[0] == Status.OUT_OF_SEQUENCES),
            (FinishReason.OUT_OF_BLOCKS, status[0] == Status.OUT_OF_BLOCKS),
        ],
    )
    num_sequences = result.reasons.shape[0]
    ended = jnp.where(refused[0] & is_alone, lanes.sequences[0], num_sequences)
    return dataclasses.replace(
        state,
        places=places._replace(
            num_running=places.num_running - unseats.astype(jnp.int32)
        ),
        seating_needs=tuple(
            jnp.where(unseats, slack + 1, needs)
            for slack, needs in zip(attempt.slack, state.seating_needs, strict=True)
        ),
        result=result._replace(reasons=scatter(result.reasons, ended, reason)),
    )
