"""Samples of a prompt share what was computed of it.

The first sample, the *leader*, computes the prompt; the others have places, but wait
until it is computed and then fork. When the last sample in the cache ends while others
still need the prompt, its row is handed over: to the oldest sample that has a place,
else to the *holder*, a sequence of the cache that has no place. Samples without a place
are the first that wait, so all of them are of one prompt, and one holder is enough.

Keys and values of a prompt are shared for as long as a sample has them. A state moves
on with the first token behind it, so that a copy is held at the prompt's end.

Symbols: Q prompts, W places.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.decoding.scheduler.places import find_oldest, sort_by_age
from jkv.decoding.scheduler.state import GenerationState, Holder, Loads
from jkv.indexing import gather, scatter_add, scatter_max, scatter_min
from jkv.sharding.loops import when
from jkv.state import NO_SEQUENCE, Cache
from jkv.verbs.forking import fork


def find_pending(
    state: GenerationState, loads: Loads, has_states: bool
) -> tuple[jax.Array, jax.Array]:
    """Find what the sequences can do that run but are not in the cache.

    Returns bool[W], those that compute a prompt of which no sample is in the cache or
    older; and bool[W], those that fork it, as it is computed.
    """
    places, prompts, done = state.places, loads.prompts, loads.done
    if has_states:
        # A sequence past its prompt's end has the prompt no more.
        done = jnp.where(done > loads.prompt_lengths, -1, done)
    num_prompts = state.prompts.lengths.shape[0]
    pending = places.is_pending
    running = jnp.where(places.is_cached, prompts, num_prompts)
    most_done = jnp.full((num_prompts,), -1, jnp.int32)
    most_done = gather(scatter_max(most_done, running, done), prompts)
    is_held = state.holder.holds(prompts)
    oldest = jnp.full((num_prompts,), places.num_places, jnp.int32)
    waiting = jnp.where(pending, prompts, num_prompts)
    oldest = gather(scatter_min(oldest, waiting, places.ages), prompts)
    is_alone = (most_done < 0) & ~is_held
    leads = pending & is_alone & (places.ages == oldest)
    return leads, pending & ((most_done >= loads.prompt_lengths) | is_held)


def find_hand_over(
    state: GenerationState,
    loads: Loads,
    ended: jax.Array,  # bool[W], whose sequences are still in their places
) -> tuple[jax.Array, jax.Array]:
    """Find the ended sequences whose prompt other samples still need.

    Returns bool[W], those that are cut back, not freed; and i32[W], the place that
    takes each one's prompt, W for the holder.
    """
    places, prompts, unfinished = state.places, loads.prompts, state.num_unfinished
    num_prompts, nothing = unfinished.shape[0], places.num_places
    stays = places.is_running & ~ended

    def of(mask: jax.Array) -> jax.Array:
        return jnp.where(mask, prompts, num_prompts)

    none = jnp.zeros((num_prompts,), jnp.int32)
    num_cached = scatter_add(none, of(stays & places.is_cached), 1)
    num_running = scatter_add(none, of(stays), 1)
    youngest = jnp.full((num_prompts,), nothing, jnp.int32)
    heir = scatter_min(youngest, of(stays & ~places.is_cached), places.ages)
    may_give = ended & places.is_cached & loads.has_prompt
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


def has_more_samples(state: GenerationState, loads: Loads) -> jax.Array:
    """Return which prompts have samples that wait without a place, bool[Q]."""
    num_prompts = state.prompts.lengths.shape[0]
    of_place = jnp.where(state.places.is_running, loads.prompts, num_prompts)
    seated = scatter_add(jnp.zeros((num_prompts,), jnp.int32), of_place, 1)
    return state.num_unfinished > seated


def hold_prompt(cache: Cache, state: GenerationState) -> tuple[Cache, GenerationState]:
    """Fork a prompt that was just computed, if samples wait for it without a place."""
    if not cache.metadata.has_states or state.num_samples == 1:
        return cache, state
    places, loads, holder = state.places, state.loads(cache), state.holder
    is_whole = places.is_cached & places.is_running
    is_whole &= loads.done == loads.prompt_lengths
    wanted = is_whole & gather(has_more_samples(state, loads), loads.prompts)
    wanted &= holder.seq_id < 0

    def hold(carry: tuple[Cache, Holder]) -> tuple[Cache, Holder]:
        cache, _ = carry
        place = find_oldest(places, wanted, 1)
        parent = gather(places.seq_ids, place, fill=NO_SEQUENCE)
        cache, forked = fork(cache, parent)
        return cache, Holder(seq_id=forked.seq_ids[0], prompt=loads.prompts[place[0]])

    cache, holder = when(jnp.any(wanted), hold, (cache, holder))
    return cache, dataclasses.replace(state, holder=holder)
