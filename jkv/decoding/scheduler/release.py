"""Release of finished sequences and preemption of the youngest.

Between two windows of steps a host may cancel sequences, or preempt all of them for
recomputation, as after a weight update.

Symbols: K lanes, Q prompts, W places.
"""

import dataclasses

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
    note_sequences,
    sort_by_age,
    vacate,
)
from jkv.decoding.sequences.blocks import (
    Blocks,
    count_free_blocks,
    reach,
    subtract,
    total,
)
from jkv.decoding.sequences.results import FinishReason
from jkv.operations import gather, scatter, when, while_loop
from jkv.state import NO_SEQUENCE, Cache
from jkv.state.entry import takes_cache
from jkv.status import Status
from jkv.verbs.allocation import free
from jkv.verbs.branching import truncate


def find_ended(state: GenerationState) -> tuple[jax.Array, jax.Array]:
    """Return the places of finished sequences, bool[W].

    Return also bool[], True if all samples of the held prompt have finished.
    """
    places = state.places
    ended = places.is_started & ~gather(state.is_running, places.sequences)
    return ended, _is_holder_unwanted(state)


def release_and_preempt(
    cache: Cache, state: GenerationState, demand: Blocks
) -> tuple[Cache, GenerationState, Blocks]:
    """Free finished sequences, and preempt the youngest until blocks suffice.

    Kept rows and a held prompt are freed first, and at least one sequence keeps
    running. `demand` are the blocks that each running sequence still needs, i32[W] per
    group. Return also the free blocks promised to no sequence, i32[] per group.
    """
    ended, is_unwanted = find_ended(state)
    gives = jnp.zeros_like(ended)
    if state.kept is not None:
        state, gives = state.kept.keep(cache, state, ended)
    if state.num_samples > 1:
        cache, state, gives = _hand_over(cache, state, ended)
        demand = state.demand(cache, state.active(cache))
    places, held = state.places, state.retained.seq_id
    demand = tuple(jnp.where(ended, 0, needs) for needs in demand)
    changed = jnp.any(ended) | is_unwanted
    state = dataclasses.replace(state, places=vacate(places, ended))

    # The held prompt follows the places, and kept rows follow the prompt.
    seq_ids = jnp.append(places.seq_ids, held)
    leaves = jnp.append(ended & ~gives & places.is_cached, is_unwanted)
    if state.kept is not None:
        seq_ids, leaves = state.kept.follow(seq_ids, leaves)
    num_lanes = min(LANES, places.num_places + 1)
    before = state.places.num_running
    Carry = tuple[Cache, GenerationState, jax.Array, Blocks]

    def goes_on(carry: Carry) -> jax.Array:
        cache, state, leaves, promised = carry
        can_give = (state.retained.seq_id >= 0) | (state.places.num_running > 1)
        lacks_blocks = can_give & ~reach(count_free_blocks(cache), promised)
        if state.kept is not None:
            lacks_blocks |= state.kept.must_leave(cache, state, promised)
        return jnp.any(leaves) | lacks_blocks

    def trip(carry: Carry) -> Carry:
        cache, state, leaves, promised = carry
        preempts = ~jnp.any(leaves)
        is_held = state.retained.seq_id >= 0
        youngest = find_youngest_running(state.places)
        victim = jnp.where(is_held, state.places.num_places, youngest)
        if state.kept is not None:
            victim, is_held = state.kept.prefer(state, victim, is_held)
        leaves = scatter(leaves, jnp.where(preempts, victim, len(leaves)), True)
        lanes = find_chosen(leaves, num_lanes)
        cache, _ = free(cache, gather(seq_ids, lanes, fill=NO_SEQUENCE))
        state = _leave_places(state, lanes)
        preempts &= ~is_held
        # A sequence that waited for its prompt has computed nothing.
        counts = preempts & (gather(seq_ids, victim) >= 0)
        running = state.places.num_running - preempts.astype(jnp.int32)
        state = dataclasses.replace(
            state,
            places=state.places._replace(num_running=running),
            result=state.result.add_counts(preemptions=counts.astype(jnp.int32)),
        )
        given = (jnp.where(preempts, gather(need, victim), 0) for need in demand)
        promised = subtract(promised, tuple(given))
        return cache, state, scatter(leaves, lanes, False), promised

    cache, state, _, promised = while_loop(
        goes_on, trip, (cache, state, leaves, total(demand))
    )
    changed |= state.places.num_running < before
    needs = tuple(jnp.where(changed, 0, n) for n in state.seating_needs)
    state = dataclasses.replace(state, seating_needs=needs)
    return cache, state, subtract(count_free_blocks(cache), promised)


def _leave_places(state: GenerationState, lanes: jax.Array) -> GenerationState:
    """Forget the cache rows of places, i32[K]; W is the held prompt, then come kept."""
    places, retained = state.places, state.retained
    is_freed = jnp.any(lanes == places.num_places)
    held = jnp.where(is_freed, NO_SEQUENCE, retained.seq_id)
    seq_ids = scatter(places.seq_ids, lanes, NO_SEQUENCE)
    return dataclasses.replace(
        state,
        places=places._replace(seq_ids=seq_ids),
        retained=retained._replace(seq_id=held),
        kept=state.kept and state.kept.leave(lanes - places.num_places - 1),
    )


def leave_ended(state: GenerationState) -> GenerationState:
    """Empty the places of finished sequences, which stay in the cache."""
    ended, _ = find_ended(state)
    places = when(jnp.any(ended), vacate, state.places, ended)
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
    nothing = tuple(jnp.zeros_like(state.places.ages) for _ in state.seating_needs)
    cache, state, _ = release_and_preempt(cache, state, nothing)
    return cache, state


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
    return note_sequences(state, place[None])


def _is_holder_unwanted(state: GenerationState) -> jax.Array:
    """Return True if all samples of the held prompt have finished, bool[]."""
    if state.num_samples == 1:
        return jnp.zeros((), bool)
    sample_index = jnp.arange(state.num_samples, dtype=jnp.int32)
    samples = state.retained.prompt * state.num_samples + sample_index
    return (state.retained.seq_id >= 0) & ~jnp.any(gather(state.is_running, samples))


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
    places, retained = state.places, state.retained
    # The blocks of the youngest are evicted first.
    youngest_first = jnp.flip(sort_by_age(places))
    seq_ids = jnp.where(places.is_running, places.seq_ids, NO_SEQUENCE)
    num_preempted = jnp.sum(seq_ids >= 0, dtype=jnp.int32)
    order = jnp.append(retained.seq_id, gather(seq_ids, youngest_first))
    cache, _ = free(cache, order)
    places = places._replace(
        seq_ids=jnp.where(places.is_running, NO_SEQUENCE, places.seq_ids),
        num_running=jnp.zeros((), jnp.int32),
    )
    all_sequences = jnp.arange(state.result.lengths.shape[0], dtype=jnp.int32)
    return cache, dataclasses.replace(
        state,
        places=places,
        retained=RetainedPrompt.none(),
        result=state.result.add_counts(preemptions=num_preempted),
        seating_needs=tuple(jnp.zeros((), jnp.int32) for _ in state.seating_needs),
        speculation=state.speculation and state.speculation.forget(all_sequences),
    )
