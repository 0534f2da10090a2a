"""New tokens: the texts in places get them, and prompts pass them to their samples.

Symbols: W places, V tokens in the vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jkv.decoding.sampling.choice import Choice
from jkv.decoding.sampling.next_token import Progress, choose_next, take_several
from jkv.decoding.sampling.stopping import Bounds
from jkv.decoding.scheduler.state import GenerationState
from jkv.decoding.steering.rows import SteeredRows
from jkv.sharding.loops import while_loop


def choose_tokens(
    state: GenerationState,
    bounds: Bounds,  # how long a text can become
    logits: jax.Array,  # f32[W, V], after the last token of each place's text
    is_ready: jax.Array,  # bool[W], whether they are
    choice: Choice,  # of N sequences
) -> tuple[GenerationState, jax.Array]:
    """Choose the next token of each text that is in the cache whole.

    Returns:
      The state, and f32[W, V] as those of `choose_next`.
    """
    places, result = state.places, state.result
    counts = result.lengths[places.sequences]
    sequences = jnp.where(is_ready, places.sequences, result.lengths.shape[0])
    state, tokens, steered = _choose(
        state, bounds, logits, sequences, state.seen, choice
    )
    if state.num_samples > 1:
        state = _choose_for_samples(
            state, bounds, logits, is_ready & (counts == 0), choice
        )
    return _note_seen(state, is_ready, tokens), steered


def take_tokens(
    state: GenerationState,  # as for `choose_tokens`; the texts have a token already
    bounds: Bounds,
    is_ready: jax.Array,
    tokens: jax.Array,  # [W, C], as for `take_several`
    logprobs: jax.Array,  # [W, C], as for `take_several`
    follows: jax.Array,  # [W, C], as for `take_several`
    before: SteeredRows | None,  # W * C rows, as there
) -> GenerationState:
    """Give texts several tokens that were chosen at once."""
    sequences = state.places.sequences
    sequences = jnp.where(is_ready, sequences, state.result.lengths.shape[0])
    progress = _find_progress(state, bounds)
    result, is_taken = take_several(
        progress, sequences, tokens, logprobs, follows, before
    )
    return _note_seen(dataclasses.replace(state, result=result), is_taken, tokens)


def _note_seen(
    state: GenerationState, is_ready: jax.Array, tokens: jax.Array
) -> GenerationState:
    """Note that texts have these tokens now, i32[W] or i32[W, C], where bool[...]."""
    place = jnp.arange(state.places.num_places, dtype=jnp.int32)
    place = place.reshape(-1, *(1,) * (tokens.ndim - 1))
    token = jnp.where(is_ready, tokens, state.seen.shape[1])
    seen = state.seen.at[place, token].set(True, mode="drop")
    return dataclasses.replace(state, seen=seen)


def _choose_for_samples(
    state: GenerationState,
    bounds: Bounds,
    logits: jax.Array,
    is_first: jax.Array,
    choice: Choice,
) -> GenerationState:
    """Choose the first tokens of all samples of prompts that are whole, bool[W].

    They are chosen at once, wherever those samples are, so that no logits are kept.
    """
    num_samples = state.num_samples
    Carry = tuple[jax.Array, GenerationState]

    def trip(carry: Carry) -> Carry:
        todo, state = carry
        place = jnp.argmax(todo)
        leader = state.places.sequences[place]
        sample_index = jnp.arange(num_samples, dtype=jnp.int32)
        sequences = lax.div(leader, jnp.int32(num_samples)) * num_samples + sample_index
        is_open = state.is_running[sequences] & (state.result.lengths[sequences] == 0)
        is_open &= sequences != leader
        chosen = jnp.where(is_open, sequences, state.result.lengths.shape[0])

        def spread(row: jax.Array) -> jax.Array:
            return jnp.broadcast_to(row[None], (num_samples, row.shape[0]))

        state, *_ = _choose(
            state,
            bounds,
            spread(logits[place]),
            chosen,
            spread(state.seen[place]),
            choice,
        )
        return todo.at[place].set(False), state

    _, state = while_loop(lambda carry: jnp.any(carry[0]), trip, (is_first, state))
    return state


def _choose(
    state: GenerationState,
    bounds: Bounds,
    logits: jax.Array,
    sequences: jax.Array,
    seen: jax.Array,
    choice: Choice,
) -> tuple[GenerationState, jax.Array, jax.Array]:
    """Choose a token for sequences of a generation, as `choose_next`."""
    progress = _find_progress(state, bounds)
    result, tokens, steered = choose_next(progress, logits, sequences, seen, choice)
    return dataclasses.replace(state, result=result), tokens, steered


def _find_progress(state: GenerationState, bounds: Bounds) -> Progress:
    return Progress(state.prompts, state.stops, bounds, state.result)
