"""Holding: a prompt that samples wait for stays in the cache at its end.

Keys and values of a prompt are shared for as long as a sample has them. A state moves
on with the first token behind it, so that a copy is held at the prompt's end.

Symbols: Q prompts, W places.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.decoding.scheduler.demand import Loads
from jkv.decoding.scheduler.places import find_oldest
from jkv.decoding.scheduler.samples import Holder
from jkv.decoding.scheduler.state import GenerationState
from jkv.sharding.loops import when
from jkv.state import NO_SEQUENCE, Cache
from jkv.verbs.forking import fork


def has_more_samples(state: GenerationState, loads: Loads) -> jax.Array:
    """Return which prompts have samples that wait without a place, bool[Q]."""
    num_prompts = state.prompts.lengths.shape[0]
    of_place = jnp.where(state.places.is_running, loads.prompts, num_prompts)
    seated = jnp.zeros((num_prompts,), jnp.int32).at[of_place].add(1, mode="drop")
    return state.num_unfinished > seated


def hold_prompt(cache: Cache, state: GenerationState) -> tuple[Cache, GenerationState]:
    """Fork a prompt that was just computed, if samples wait for it without a place.

    Without layers that keep a state there is nothing to do.
    """
    if not cache.metadata.has_states or state.num_samples == 1:
        return cache, state
    places, loads, holder = state.places, state.loads(cache), state.holder
    is_whole = places.is_cached & places.is_running
    is_whole &= loads.done == loads.prompt_lengths
    wanted = is_whole & has_more_samples(state, loads)[loads.prompts]
    wanted &= holder.seq_id < 0

    def hold(carry: tuple[Cache, Holder]) -> tuple[Cache, Holder]:
        cache, _ = carry
        place = find_oldest(places, wanted, 1)
        parent = places.seq_ids.at[place].get(mode="fill", fill_value=NO_SEQUENCE)
        cache, forked = fork(cache, parent)
        return cache, Holder(seq_id=forked.seq_ids[0], prompt=loads.prompts[place[0]])

    cache, holder = when(jnp.any(wanted), hold, (cache, holder))
    return cache, dataclasses.replace(state, holder=holder)
