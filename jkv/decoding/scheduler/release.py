"""Release of finished sequences and preemption of the youngest.

Between two windows of steps a host may cancel sequences, or preempt all of them for
recomputation, as after a weight update.

Symbols: K lanes, Q prompts, W places.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.decoding.scheduler.queue import find_hand_over
from jkv.decoding.scheduler.state import (
    LANES,
    GenerationState,
    RetainedPrompt,
    find_chosen,
    find_oldest,
    find_youngest_running,
    note_texts,
    unseat_youngest,
    vacate,
)
from jkv.decoding.texts.blocks import Blocks, count_free_blocks, reach, subtract, total
from jkv.decoding.texts.results import FinishReason
from jkv.indexing import gather, scatter
from jkv.sharding.loops import when, while_loop
from jkv.state import NO_SEQUENCE, Cache
from jkv.state.entry import takes_cache
from jkv.status import Status
from jkv.verbs.allocation import free
from jkv.verbs.branching import truncate


def release_ended(
    cache: Cache, state: GenerationState
) -> tuple[Cache, GenerationState]:
    """Free finished sequences and empty their places."""
    Carry = tuple[Cache, GenerationState]

    def release(carry: Carry) -> Carry:
        cache, state = carry
        gives = jnp.zeros_like(ended)
        if state.num_samples > 1:
            cache, state, gives = _hand_over(cache, state, ended)
        seq_ids = jnp.where(ended & ~gives, state.places.seq_ids, NO_SEQUENCE)
        held = state.retained.seq_id
        unwanted = jnp.where(is_unwanted, held, NO_SEQUENCE)
        kept = jnp.where(is_unwanted, NO_SEQUENCE, held)
        cache = _free_all(cache, jnp.concatenate([seq_ids, unwanted[None]]))
        return cache, dataclasses.replace(
            state,
            places=vacate(state.places, ended),
            retained=state.retained._replace(seq_id=kept),
            seating_needs=jax.tree.map(jnp.zeros_like, state.seating_needs),
        )

    # In most steps no sequence finishes.
    places = state.places
    ended = places.is_started & ~gather(state.is_running, places.sequences)
    is_unwanted = _is_holder_unwanted(state)
    return when(jnp.any(ended) | is_unwanted, release, (cache, state))


def leave_ended(state: GenerationState) -> GenerationState:
    """Empty the places of finished sequences, which stay in the cache."""
    places = state.places
    ended = places.is_started & ~gather(state.is_running, places.sequences)
    places = when(jnp.any(ended), vacate, places, ended)
    return dataclasses.replace(state, places=places)


@takes_cache()
def cancel(
    cache: Cache, state: GenerationState, sequences: jax.Array
) -> tuple[Cache, GenerationState]:
    """Cancel sequences, running or waiting, and free their blocks.

    Their tokens so far are kept. The other sequences are unaffected.

    Args:
      cache: from `prefill` or `decode`; jit may donate it.
      state: returned with the cache; jit may donate it, too.
      sequences: bool[N], True to cancel; finished sequences are unchanged.

    Returns:
      The cache and the state.

    Raises:
      ValueError: if `sequences` is not bool[N].

    Example:
      >>> import jax, jax.numpy as jnp, jkv
      >>> from jkv.decoding import cancel, prefill
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> cache, state = prefill(
      ...     count_on, None, cache, [[5, 6, 7], [40]], max_new_tokens=4)
      >>> cache, state = cancel(cache, state, jnp.array([True, False]))
      >>> state.is_running.tolist(), int(jkv.num_free_blocks(cache))
      ([False, True], 7)
    """
    sizes, why = {"N": state.result.reasons.shape[0]}, "True for each one to end"
    expect("sequences", sequences, "N", sizes, jnp.bool_, why=why)
    reasons = jnp.where(
        state.is_running & sequences,
        jnp.int32(FinishReason.CANCELLED),
        state.result.reasons,
    )
    state = dataclasses.replace(state, result=state.result._replace(reasons=reasons))
    return release_ended(cache, state)


def _free_all(cache: Cache, seq_ids: jax.Array) -> Cache:
    """Free sequences, i32[P], a few per trip, as few places finish at a time."""
    num_lanes = min(LANES, seq_ids.shape[0])
    Carry = tuple[Cache, jax.Array]

    def trip(carry: Carry) -> Carry:
        cache, left = carry
        chosen = find_chosen(left, num_lanes)
        lanes = gather(seq_ids, chosen, fill=NO_SEQUENCE)
        cache, _ = free(cache, lanes)
        return cache, scatter(left, chosen, False)

    left = seq_ids != NO_SEQUENCE
    cache, _ = while_loop(lambda carry: jnp.any(carry[1]), trip, (cache, left))
    return cache


def _hand_over(
    cache: Cache, state: GenerationState, ended: jax.Array
) -> tuple[Cache, GenerationState, jax.Array]:
    """Hand over prompts that other samples need; return also the rows kept, bool[W]."""
    places, active = state.places, state.active(cache)
    prompt_lengths = active.prompt_lengths
    if state.shortening is not None:
        prompt_lengths = state.shortening.shared(prompt_lengths)
    gives, receivers = find_hand_over(state, active, ended)
    # There is one retained: it is free again before a second prompt needs it.
    gives &= (receivers < places.num_places) | (state.retained.seq_id < 0)
    Carry = tuple[Cache, GenerationState, jax.Array, jax.Array]

    def trip(carry: Carry) -> Carry:
        cache, state, left, given = carry
        giver = find_oldest(places, left, 1)[0]
        seq_id, length = (
            gather(places.seq_ids, giver),
            gather(prompt_lengths, giver),
        )
        cache, status = truncate(cache, seq_id[None], length[None])
        # A sequence that cannot be truncated is freed and its prompt recomputed.
        is_cut = status[0] == Status.OK
        receiver = jnp.where(is_cut, gather(receivers, giver), -1)
        state = _receive(state, receiver, seq_id, gather(active.prompts, giver))
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
    """Give a row to place `receiver`, i32[]; W is the retained prompt, -1 nothing."""
    places, retained = state.places, state.retained
    place = jnp.where(receiver < 0, places.num_places, receiver)
    is_held = receiver == places.num_places
    state = dataclasses.replace(
        state,
        places=places._replace(seq_ids=scatter(places.seq_ids, place, seq_id)),
        retained=RetainedPrompt(
            seq_id=jnp.where(is_held, seq_id, retained.seq_id),
            prompt=jnp.where(is_held, prompt, retained.prompt),
        ),
    )
    return note_texts(state, place[None])


def _is_holder_unwanted(state: GenerationState) -> jax.Array:
    """Return True if all samples of the held prompt have finished, bool[]."""
    if state.num_samples == 1:
        return jnp.zeros((), bool)
    sample_index = jnp.arange(state.num_samples, dtype=jnp.int32)
    samples = state.retained.prompt * state.num_samples + sample_index
    return (state.retained.seq_id >= 0) & ~jnp.any(gather(state.is_running, samples))


# The blocks still promised are i32[] for each group.
Carry = tuple[Cache, GenerationState, Blocks]


def preempt_youngest(
    cache: Cache, state: GenerationState
) -> tuple[Cache, GenerationState, Blocks]:
    """Preempt the youngest sequences until the free blocks cover the demand.

    A held prompt is freed first, and at least one sequence keeps running.

    Returns:
      The cache, the state, and free blocks promised to no sequence, i32[] per group.
    """
    demand = state.demand(cache, state.active(cache))

    def lacks_blocks(carry: Carry) -> jax.Array:
        cache, state, promised = carry
        can_give = (state.retained.seq_id >= 0) | (state.places.num_running > 1)
        return can_give & ~reach(count_free_blocks(cache), promised)

    before = state.places.num_running
    take_back = functools.partial(_take_back, demand)
    cache, state, promised = while_loop(
        lacks_blocks, take_back, (cache, state, total(demand))
    )
    is_same = state.places.num_running == before
    needs = tuple(jnp.where(is_same, n, 0) for n in state.seating_needs)
    state = dataclasses.replace(state, seating_needs=needs)
    return cache, state, subtract(count_free_blocks(cache), promised)


@takes_cache()
def preempt(cache: Cache, state: GenerationState) -> tuple[Cache, GenerationState]:
    """Preempt all running sequences and free their blocks; their tokens are kept.

    They are recomputed in the same order, prompts and generated tokens alike, with the
    weights of the next call. Prefix cache hits are not recomputed, so clear the index
    after a weight update (`jkv.clear_prefixes`). A draft model is recomputed as well.

    Args:
      cache: from `prefill` or `decode`; jit may donate it.
      state: returned with the cache; jit may donate it, too.

    Returns:
      The cache and the state, in which no sequence runs until the next `decode`.

    Example:
      >>> import jax, jkv
      >>> from jkv.decoding import decode, preempt, prefill
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + params, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> cache, state = prefill(count_on, 1, cache, [[5], [40]], max_new_tokens=3)
      >>> cache, state = preempt(cache, state)
      >>> int(jkv.num_free_blocks(cache)), state.is_running.tolist()
      (8, [True, True])
      >>> cache, state = decode(count_on, 2, cache, state)
      >>> state.result.tokens.tolist()
      [[6, 8, 10], [41, 43, 45]]
    """
    nothing = tuple(jnp.zeros_like(state.places.ages) for _ in state.seating_needs)

    def goes_on(carry: Carry) -> jax.Array:
        state = carry[1]
        return (state.retained.seq_id >= 0) | (state.places.num_running > 0)

    cache, state, needs = while_loop(
        goes_on, functools.partial(_take_back, nothing), (cache, state, total(nothing))
    )
    all_sequences = jnp.arange(state.result.lengths.shape[0], dtype=jnp.int32)
    return cache, dataclasses.replace(
        state,
        seating_needs=needs,
        speculation=state.speculation and state.speculation.forget(all_sequences),
    )


def _take_back(demand: Blocks, carry: Carry) -> Carry:
    """Free the held prompt, or else the youngest sequence, and subtract its demand."""
    cache, state, promised = carry
    is_held = state.retained.seq_id >= 0
    youngest = find_youngest_running(state.places)
    seq_id = jnp.where(
        is_held, state.retained.seq_id, gather(state.places.seq_ids, youngest)
    )
    cache, _ = free(cache, seq_id[None])
    places = jax.tree.map(
        lambda kept, new: jnp.where(is_held, kept, new),
        state.places,
        unseat_youngest(state.places),
    )
    # A sequence that waited for its prompt has computed nothing.
    counts = ~is_held & (seq_id >= 0)
    state = dataclasses.replace(
        state,
        places=places,
        retained=state.retained._replace(seq_id=jnp.int32(NO_SEQUENCE)),
        result=state.result.add_counts(preemptions=counts.astype(jnp.int32)),
    )
    given = tuple(jnp.where(is_held, 0, gather(blocks, youngest)) for blocks in demand)
    return cache, state, subtract(promised, given)
