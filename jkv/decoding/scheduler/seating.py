"""Seating: the first that wait get places, as far as places and blocks reach.

Symbols: K lanes, W places.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.scheduler import queue
from jkv.decoding.scheduler.queue import Candidates, Seated
from jkv.decoding.scheduler.state import GenerationState, Loads
from jkv.decoding.texts.blocks import (
    Blocks,
    blocks_beside_prompt,
    blocks_for,
    count_free_blocks,
    reach,
    subtract,
    total,
)
from jkv.decoding.texts.results import FinishReason
from jkv.state import Cache


class Attempt(NamedTuple):
    """What seating leaves to be found out by admitting sequences to the cache."""

    # bool[], whether the youngest was seated only to see if the cache has room for it:
    # the prefix index may have enough of its text, or no other sequence runs.
    is_trial: jax.Array
    keep_free: Blocks  # i32[], promised to others, which a trial leaves alone
    slack: Blocks  # i32[], free ones that were promised to no sequence
    goes_on: jax.Array  # bool[], whether more may be seated


class _Offer(NamedTuple):
    """What the first K that wait would cost."""

    candidates: Candidates
    ended: jax.Array  # bool[K], they ended while they waited
    costs: Blocks  # i32[K]; of a leader, those of its whole text
    may_cost_less: jax.Array  # bool[K], the prefix index may have some of them


def may_seat(state: GenerationState, slack: Blocks) -> jax.Array:
    """Return whether it is worth while to look at what waits, bool[].

    The slack, i32[], is free blocks that were promised to no sequence.
    """
    places = state.places
    waits = (places.num_started > places.num_running) | (state.queue.count > 0)
    has_place = places.num_running < state.most_running
    is_empty = places.num_running == 0
    return waits & has_place & (is_empty | reach(slack, state.seating_needs))


def seat_waiting(
    cache: Cache, state: GenerationState, num_lanes: int
) -> tuple[GenerationState, Attempt]:
    """Seat the first that wait, at most K, which is static."""
    places, loads = state.places, state.loads(cache)
    promised = total(state.demand(cache, loads))
    slack = subtract(count_free_blocks(cache), promised)
    num_free_places = state.most_running - places.num_running
    offer = _find_offer(cache, state, loads, num_lanes)
    result = queue.choose_seated(
        offer.candidates,
        offer.ended,
        offer.costs,
        num_free_blocks=slack,
        num_free_places=num_free_places,
    )
    num_passed = jnp.sum(result.passed, dtype=jnp.int32)
    is_refused = offer.candidates.exists[0] & (num_passed == 0) & (num_free_places > 0)
    # To admit it to the cache takes a lane.
    has_lane = jnp.sum(places.is_pending, dtype=jnp.int32) < num_lanes
    may_fit = offer.may_cost_less[0] & reach(slack, state.seating_needs)
    is_trial = is_refused & has_lane & (may_fit | (places.num_running == 0))
    forced = is_trial & (jnp.arange(num_lanes, dtype=jnp.int32) == 0)
    result = Seated(result.seated | forced, result.passed | forced)
    places, waiting = queue.seat(places, state.queue, offer.candidates, result)
    # The next one cannot be seated without these, unless the index has some of it.
    known = offer.candidates.exists & ~offer.may_cost_less
    needs = [jnp.where(known, cost, 0) for cost in offer.costs]
    state = dataclasses.replace(
        state,
        places=places,
        queue=waiting,
        seating_needs=tuple(
            need.at[num_passed].get(mode="fill", fill_value=0) for need in needs
        ),
    )
    is_tried_next = offer.may_cost_less.at[num_passed].get(
        mode="fill", fill_value=False
    )
    goes_on = is_trial | (num_passed == num_lanes) | (is_tried_next & (num_passed > 0))
    keep_free = tuple(jnp.where(is_trial, blocks, 0) for blocks in promised)
    return state, Attempt(is_trial, keep_free, slack, goes_on)


def _find_offer(
    cache: Cache, state: GenerationState, loads: Loads, num_lanes: int
) -> _Offer:
    candidates = queue.find_candidates(state.places, state.queue, num_lanes)
    sequences, size = candidates.sequences, state.block_size(cache)
    ended = state.result.reasons[sequences] != FinishReason.RUNNING
    prompt = jax.lax.div(sequences, jnp.int32(state.num_samples))
    prompt_lengths = state.prompts.lengths[prompt]
    text_lengths = prompt_lengths + state.result.lengths[sequences]
    costs, leads = blocks_for(text_lengths, size), jnp.ones_like(ended)
    if state.num_samples > 1:
        # The first sample computes the prompt, unless it is held for it.
        is_first = _is_first_sample(state, loads, prompt, ended)
        is_held = state.holder.holds(prompt)
        beside = blocks_beside_prompt(prompt_lengths, text_lengths, size)
        held = subtract(costs, blocks_for(prompt_lengths, size))
        leads = is_first & ~is_held
        costs = tuple(
            jnp.where(leads, whole, jnp.where(is_first, rest, own))
            for whole, rest, own in zip(costs, held, beside, strict=True)
        )
    may_cost_less = leads & cache.metadata.index.is_there
    return _Offer(candidates, ended, costs, may_cost_less)


def _is_first_sample(
    state: GenerationState, loads: Loads, prompt: jax.Array, ended: jax.Array
) -> jax.Array:
    """Return which candidates are the first of their prompts, i32[K], bool[K]."""
    lane = jnp.arange(prompt.shape[0], dtype=jnp.int32)
    is_before = (lane[None] < lane[:, None]) & ~ended[None]
    follows = jnp.any(is_before & (prompt[None] == prompt[:, None]), axis=1)
    is_running = state.places.is_running[None]
    joins = jnp.any(is_running & (loads.prompts[None] == prompt[:, None]), axis=1)
    return ~(follows | joins)
