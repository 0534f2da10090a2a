"""Preemption: where blocks lack, the youngest sequence gives its own back and waits.

A host may also ask it of all, between two windows: what they have is then computed
again, as after a change of the weights.

Symbols: W places.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jkv.decoding.scheduler.places import find_youngest_running, unseat_youngest
from jkv.decoding.scheduler.state import GenerationState
from jkv.decoding.texts.blocks import Blocks, count_free_blocks, reach, subtract, total
from jkv.indexing import gather
from jkv.sharding.loops import while_loop
from jkv.state import NO_SEQUENCE, Cache
from jkv.state.entry import takes_cache
from jkv.verbs.allocation import free

# The blocks that stay promised are i32[], of each group.
Carry = tuple[Cache, GenerationState, Blocks]


def preempt_youngest(
    cache: Cache, state: GenerationState
) -> tuple[Cache, GenerationState, Blocks]:
    """Preempt the youngest until the free blocks reach for what the others need.

    A prompt that is held goes first. One sequence is left at least. Returns also i32[]
    for each group: free blocks that were promised to no sequence.
    """
    demand = state.demand(cache, state.loads(cache))

    def lacks_blocks(carry: Carry) -> jax.Array:
        cache, state, promised = carry
        can_give = (state.holder.seq_id >= 0) | (state.places.num_running > 1)
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
    """Let all running sequences give their blocks back and wait; tokens are kept.

    They go on in the order they had, and compute what they need again: prompts and
    tokens alike, with the weights that the next call gets. What the prefix index finds
    is not computed again, so a host whose weights changed clears it
    (`jkv.clear_prefixes`). A draft model begins anew, too.

    Args:
      cache: from `prefill` or `decode`; jit may donate it.
      state: what came with the cache; jit may donate it, too.

    Returns:
      The cache and the state, in which nothing runs until the next `decode`.

    Example:
      >>> import jax, jkv
      >>> from jkv.decoding import decode, preempt, prefill
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + params, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16))
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
        return (state.holder.seq_id >= 0) | (state.places.num_running > 0)

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
    """Take the blocks of the holder, or else of the youngest; its demand, i32[W]."""
    cache, state, promised = carry
    is_held = state.holder.seq_id >= 0
    youngest = find_youngest_running(state.places)
    seq_id = jnp.where(
        is_held, state.holder.seq_id, gather(state.places.seq_ids, youngest)
    )
    cache, _ = free(cache, seq_id[None])
    places = jax.tree.map(
        lambda kept, new: jnp.where(is_held, kept, new),
        state.places,
        unseat_youngest(state.places),
    )
    # A sequence that waited for its prompt had computed nothing.
    counts = ~is_held & (seq_id >= 0)
    state = dataclasses.replace(
        state,
        places=places,
        holder=state.holder._replace(seq_id=jnp.int32(NO_SEQUENCE)),
        result=state.result.add_counts(preemptions=counts.astype(jnp.int32)),
    )
    given = tuple(jnp.where(is_held, 0, gather(blocks, youngest)) for blocks in demand)
    return cache, state, subtract(promised, given)
