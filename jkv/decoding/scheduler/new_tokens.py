"""New tokens: the texts in places get them, and prompts pass them to their samples.

Symbols: W places, V tokens in the vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jkv.decoding.sampling.draws import Choice
from jkv.decoding.sampling.next_token import choose_next
from jkv.decoding.sampling.stopping import Progress
from jkv.decoding.scheduler.state import GenerationState
from jkv.decoding.texts.results import Generation
from jkv.sharding.loops import while_loop
from jkv.state import Cache


def choose_tokens(
    cache: Cache,
    state: GenerationState,
    logits: jax.Array,  # f32[W, V], after the last token of each place's text
    is_ready: jax.Array,  # bool[W], whether they are
    choice: Choice,  # of N sequences
) -> tuple[GenerationState, jax.Array]:
    """Choose the next token of each text that is in the cache whole.

    Returns also the logits, f32[W, V], of `choose_next`.
    """
    places, lengths = state.places, state.result.lengths
    sequences = jnp.where(is_ready, places.sequences, lengths.shape[0])
    progress = state.progress(cache)
    result, tokens, steered = choose_next(
        progress, logits, sequences, state.seen, choice
    )
    if state.num_samples > 1:
        is_first = is_ready & (lengths[places.sequences] == 0)
        progress = progress._replace(result=result)
        result = _choose_for_samples(progress, state, logits, is_first, choice)
    state = dataclasses.replace(state, result=result)
    return note_seen(state, is_ready, tokens), steered


def note_seen(
    state: GenerationState, is_ready: jax.Array, tokens: jax.Array
) -> GenerationState:
    """Note that texts have these tokens now, i32[W] or i32[W, C], where bool[...]."""
    place = jnp.arange(state.places.num_places, dtype=jnp.int32)
    place = place.reshape(-1, *(1,) * (tokens.ndim - 1))
    token = jnp.where(is_ready, tokens, state.seen.shape[1])
    seen = state.seen.at[place, token].set(True, mode="drop")
    return dataclasses.replace(state, seen=seen)


def _choose_for_samples(
    progress: Progress,
    state: GenerationState,
    logits: jax.Array,
    is_first: jax.Array,
    choice: Choice,
) -> Generation:
    """Choose the first tokens of all samples of prompts that are whole, bool[W].

    They are chosen at once, wherever those samples are, so that no logits are kept.
    """
    num_samples, num_sequences = state.num_samples, state.result.lengths.shape[0]
    Carry = tuple[jax.Array, Generation]

    def trip(carry: Carry) -> Carry:
        todo, result = carry
        place = jnp.argmax(todo)
        leader = state.places.sequences[place]
        sample_index = jnp.arange(num_samples, dtype=jnp.int32)
        sequences = lax.div(leader, jnp.int32(num_samples)) * num_samples + sample_index
        before = progress._replace(result=result)
        is_open = before.is_running[sequences] & (result.lengths[sequences] == 0)
        is_open &= sequences != leader
        chosen = jnp.where(is_open, sequences, num_sequences)

        def spread(row: jax.Array) -> jax.Array:
            return jnp.broadcast_to(row[None], (num_samples, row.shape[0]))

        rows, seen = spread(logits[place]), spread(state.seen[place])
        result, *_ = choose_next(before, rows, chosen, seen, choice)
        return todo.at[place].set(False), result

    carry = is_first, progress.result
    return while_loop(lambda carry: jnp.any(carry[0]), trip, carry)[1]
