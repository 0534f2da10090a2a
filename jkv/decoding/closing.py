"""Places are emptied: sequences that ended are freed, and the youngest preempted.

Symbols: K lanes, Q prompts, W places.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.conditions import when
from jkv.decoding.progress import GenerationState, count_free_blocks, note_texts
from jkv.decoding.results import FinishReason
from jkv.decoding.scheduling.demand import (
    Blocks,
    find_demand,
    reach,
    subtract,
    total,
)
from jkv.decoding.scheduling.groups import Holder, find_hand_over
from jkv.decoding.scheduling.places import (
    LANES,
    Places,
    find_chosen,
    find_oldest,
    find_youngest_running,
    preempt_youngest,
    vacate,
)
from jkv.sharding.loops import while_loop
from jkv.state import NO_SEQUENCE, Cache, Metadata
from jkv.status import Status
from jkv.verbs.allocation import free
from jkv.verbs.truncation import truncate


def close_ended(cache: Cache, state: GenerationState) -> tuple[Cache, GenerationState]:
    """Free the sequences that ended, and empty their places."""
    Carry = tuple[Cache, GenerationState]

    def close(carry: Carry) -> Carry:
        cache, state = carry
        gives = jnp.zeros_like(ended)
        if state.num_samples > 1:
            cache, state, gives = _hand_over(cache, state, ended)
        seq_ids = jnp.where(ended & ~gives, state.places.seq_ids, NO_SEQUENCE)
        held = state.holder.seq_id
        unwanted = jnp.where(is_unwanted, held, NO_SEQUENCE)
        kept = jnp.where(is_unwanted, NO_SEQUENCE, held)
        cache = _free_all(cache, jnp.concatenate([seq_ids, unwanted[None]]))
        return cache, dataclasses.replace(
            state,
            places=vacate(state.places, ended),
            holder=dataclasses.replace(state.holder, seq_id=kept),
            seating_needs=jax.tree.map(jnp.zeros_like, state.seating_needs),
        )

    # In most steps nobody ends.
    places = state.places
    ended = places.is_started & ~state.is_running[places.sequences]
    is_unwanted = _is_holder_unwanted(state)
    return when(jnp.any(ended) | is_unwanted, close, (cache, state))


def _free_all(cache: Cache, seq_ids: jax.Array) -> Cache:
    """Free sequences, i32[P], some at a time, as mostly few of all places end."""
    num_lanes = min(LANES, seq_ids.shape[0])
    Carry = tuple[Cache, jax.Array]

    def trip(carry: Carry) -> Carry:
        cache, left = carry
        chosen = find_chosen(left, num_lanes)
        lanes = seq_ids.at[chosen].get(mode="fill", fill_value=NO_SEQUENCE)
        cache, _ = free(cache, lanes)
        return cache, left.at[chosen].set(False, mode="drop")

    left = seq_ids != NO_SEQUENCE
    cache, _ = while_loop(lambda carry: jnp.any(carry[1]), trip, (cache, left))
    return cache


def make_room(
    cache: Cache, state: GenerationState
) -> tuple[Cache, GenerationState, Blocks]:
    """Preempt the youngest until the free blocks reach for what the others need.

    A prompt that is held goes first. One sequence is left at least.

    Returns:
      The cache, the state, and i32[] for each group: free blocks that were promised to
      nobody.
    """
    demand = find_demand(state.places, state.loads(cache), state.block_size(cache))

    def lacks_blocks(pool: _Pool) -> jax.Array:
        can_give = (pool.holder.seq_id >= 0) | (pool.places.num_running > 1)
        free = tuple(group.free_blocks.count for group in pool.metadata.groups)
        return can_give & ~reach(free, pool.promised)

    none = jnp.zeros((), jnp.int32)
    pool = while_loop(
        lacks_blocks,
        lambda pool: _take_back(cache, pool, demand),
        _Pool(cache.metadata, state.places, state.holder, total(demand), none),
    )
    cache = cache.with_metadata(pool.metadata)
    is_same = pool.places.num_running == state.places.num_running
    state = dataclasses.replace(
        state,
        places=pool.places,
        holder=pool.holder,
        seating_needs=tuple(jnp.where(is_same, n, 0) for n in state.seating_needs),
        result=state.result.add_counts(preemptions=pool.num_preempted),
    )
    return cache, state, subtract(count_free_blocks(cache), pool.promised)


class _Pool(NamedTuple):
    """What `make_room` changes."""

    metadata: Metadata
    places: Places
    holder: Holder
    promised: Blocks  # i32[]
    num_preempted: jax.Array  # i32[]


def _take_back(cache: Cache, pool: _Pool, demand: Blocks) -> _Pool:
    """Take the blocks of the holder, or else of the youngest; its demand, i32[W]."""
    is_held = pool.holder.seq_id >= 0
    youngest = find_youngest_running(pool.places)
    seq_id = jnp.where(is_held, pool.holder.seq_id, pool.places.seq_ids[youngest])
    cache, _ = free(cache.with_metadata(pool.metadata), seq_id[None])
    places = jax.tree.map(
        lambda kept, new: jnp.where(is_held, kept, new),
        pool.places,
        preempt_youngest(pool.places),
    )
    # One that waited for its prompt had computed nothing.
    counts = ~is_held & (seq_id >= 0)
    return _Pool(
        metadata=cache.metadata,
        places=places,
        holder=dataclasses.replace(pool.holder, seq_id=jnp.int32(NO_SEQUENCE)),
        promised=subtract(
            pool.promised,
            tuple(jnp.where(is_held, 0, blocks[youngest]) for blocks in demand),
        ),
        num_preempted=pool.num_preempted + counts.astype(jnp.int32),
    )


def _hand_over(
    cache: Cache, state: GenerationState, ended: jax.Array
) -> tuple[Cache, GenerationState, jax.Array]:
    """Hand over the prompts of ended sequences, bool[W], that others still want.

    Returns:
      The cache, the state, and bool[W]: whose sequence is not to be freed.
    """
    places, loads = state.places, state.loads(cache)
    wanted = find_hand_over(
        places, ended, loads.prompts, loads.has_prompt, _count_unfinished(state)
    )
    # There is one holder; its prompt is handed over before another is wanted.
    gives = wanted.gives & (
        (wanted.receiver < places.num_places) | (state.holder.seq_id < 0)
    )
    Carry = tuple[Cache, GenerationState, jax.Array, jax.Array]

    def trip(carry: Carry) -> Carry:
        cache, state, left, given = carry
        giver = find_oldest(places, left, 1)[0]
        seq_id, length = places.seq_ids[giver], loads.prompt_lengths[giver]
        cache, status = truncate(cache, seq_id[None], length[None])
        # One that cannot be cut back is freed, and the prompt is computed again.
        is_cut = status[0] == Status.OK
        receiver = jnp.where(is_cut, wanted.receiver[giver], -1)
        state = _receive(state, receiver, seq_id, loads.prompts[giver])
        return cache, state, left.at[giver].set(False), given.at[giver].set(is_cut)

    cache, state, _, given = while_loop(
        lambda carry: jnp.any(carry[2]),
        trip,
        (cache, state, gives, jnp.zeros_like(gives)),
    )
    return cache, state, given


def _receive(
    state: GenerationState, receiver: jax.Array, seq_id: jax.Array, prompt: jax.Array
) -> GenerationState:
    """Give a place the sequence of a prompt, or hold it.

    Args:
      state: the generation.
      receiver: i32[], a place; W holds it, -1 does neither.
      seq_id: i32[], the sequence.
      prompt: i32[], whose tokens it has.
    """
    places, holder = state.places, state.holder
    place = jnp.where(receiver < 0, places.num_places, receiver)
    is_held = receiver == places.num_places
    state = dataclasses.replace(
        state,
        places=dataclasses.replace(
            places, seq_ids=places.seq_ids.at[place].set(seq_id, mode="drop")
        ),
        holder=Holder(
            seq_id=jnp.where(is_held, seq_id, holder.seq_id),
            prompt=jnp.where(is_held, prompt, holder.prompt),
        ),
    )
    return note_texts(state, place[None])


def _is_holder_unwanted(state: GenerationState) -> jax.Array:
    """Return whether a prompt is held of which all samples have ended, bool[]."""
    if state.num_samples == 1:
        return jnp.zeros((), bool)
    sample_index = jnp.arange(state.num_samples, dtype=jnp.int32)
    samples = state.holder.prompt * state.num_samples + sample_index
    return (state.holder.seq_id >= 0) & ~jnp.any(state.is_running[samples])


def _count_unfinished(state: GenerationState) -> jax.Array:
    """Return the samples of each prompt that have not ended, i32[Q]."""
    running = state.result.reasons == FinishReason.RUNNING
    by_prompt = running.reshape(-1, state.num_samples)
    return jnp.sum(by_prompt, axis=1, dtype=jnp.int32)
