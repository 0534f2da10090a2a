"""Guesses are checked: one step computes them all, and tokens are chosen as ever.

The rows of a step are each text's newest token and the guesses behind it. Its logits
choose the token after each row as a plain step would, one row after the other, for as
long as the token chosen is the one that was guessed. The rows behind are cut off.

Symbols: W places, K guesses of each, V tokens in the vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.choosing import Sampler, choose_more
from jkv.decoding.model import Model, call_model_for_rows
from jkv.decoding.options import Sampling
from jkv.decoding.progress import GenerationState, count_free_blocks
from jkv.decoding.prompts import find_tokens
from jkv.decoding.scheduling.demand import (
    BlockSize,
    Loads,
    count_columns,
    reach,
    subtract,
    total,
)
from jkv.decoding.step import Computed, count_step, note_refusals
from jkv.metadata.prefixes import sequences
from jkv.metadata.xla_cpu import running_sum
from jkv.sharding.loops import while_loop
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.verbs.appending import append
from jkv.verbs.prefixes import commit
from jkv.verbs.truncation import truncate


class Guesses(NamedTuple):
    """What is guessed of each place's text."""

    tokens: jax.Array  # i32[W, K]
    counts: jax.Array  # i32[W], how many there are

    @classmethod
    def none(cls, num_places: int, num_tokens: int) -> "Guesses":
        """Guess nothing."""
        return cls(
            tokens=jnp.zeros((num_places, num_tokens), jnp.int32),
            counts=jnp.zeros((num_places,), jnp.int32),
        )


def limit_guesses(
    cache: Cache, state: GenerationState, loads: Loads, counts: jax.Array
) -> jax.Array:
    """Return how many guesses there is room for, at most `counts`, i32[W].

    A text takes no more than it may become, and no block that another was promised.
    """
    places, size = state.places, BlockSize(cache.block_size)
    made = state.result.lengths[places.sequences]
    left = state.prompts.limits[loads.prompts] - made
    room = cache.max_context_length - loads.text_lengths
    counts = jnp.clip(jnp.minimum(left - 1, room), 0, counts)
    is_ready = places.is_cached & places.is_running
    counts = jnp.where(is_ready, counts, 0)

    columns = count_columns(loads.text_lengths, size)
    promised = tuple(jnp.maximum(mapped, columns) for mapped in loads.mapped)
    needs = subtract(promised, loads.mapped)
    needs = tuple(jnp.where(is_ready, need, 0) for need in needs)
    slack = subtract(count_free_blocks(cache), total(needs))
    columns = count_columns(loads.text_lengths + counts, size)
    more = [jnp.maximum(columns - each, 0) for each in promised]
    fits = reach(
        slack, tuple(running_sum(jnp.where(is_ready, each, 0)) for each in more)
    )
    owned = functools.reduce(jnp.minimum, promised) * size.tokens
    owned = jnp.maximum(owned - loads.text_lengths, 0)
    return jnp.where(fits, counts, jnp.minimum(counts, owned))


def check_guesses(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    sampling: Sampling,
    guesses: Guesses,
    make_sampler: Callable[[jax.Array], Sampler],
) -> tuple[Cache, GenerationState, jax.Array]:
    """Do a step with guesses, in which each text that runs lacks one token.

    Args:
      model, params: as for `generate`.
      cache: the cache.
      state: the generation.
      sampling: of N sequences.
      guesses: for W places.
      make_sampler: returns how tokens are chosen after i guesses, i32[].

    Returns:
      The cache, the state, and i32[W], how many guesses of each were right.
    """
    loads, places = state.loads(cache), state.places
    is_ready = places.is_cached & places.is_running
    cache, batch, logits = _compute_guesses(
        model, params, cache, state, loads, is_ready, guesses
    )
    num_rows = batch.query_lengths
    computed = Computed(logits[:, 0], batch.status, jnp.minimum(num_rows, 1))
    state = count_step(cache, state, loads, computed)
    state = note_refusals(state, computed)
    before = state.result.lengths[places.sequences]
    state = _choose_checked(
        cache, state, sampling, guesses, logits, num_rows > 0, make_sampler
    )
    made = state.result.lengths[places.sequences] - before
    made = jnp.where(num_rows > 0, made, 0)
    cache = _keep(cache, batch, loads, jnp.minimum(made, num_rows))
    accepted = jnp.maximum(made - 1, 0)
    state = dataclasses.replace(
        state,
        result=state.result.add_counts(
            draft_tokens=jnp.sum(jnp.maximum(num_rows - 1, 0), dtype=jnp.int32),
            accepted_tokens=jnp.sum(accepted, dtype=jnp.int32),
        ),
    )
    return cache, state, accepted


def _compute_guesses(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    loads: Loads,
    is_ready: jax.Array,
    guesses: Guesses,
) -> tuple[Cache, Batch, jax.Array]:
    """Compute the newest token of each text and the guesses behind it.

    Returns:
      The cache, the batch, and the logits after each row, f32[W, K + 1, V].
    """
    num_places, num_tokens = guesses.tokens.shape
    sequence = jnp.where(is_ready, state.places.sequences, 0)
    newest = find_tokens(state.prompts, state.result, sequence, loads.done)
    tokens = jnp.concatenate([newest[:, None], guesses.tokens], axis=1).reshape(-1)
    cache, batch = append(
        cache,
        jnp.where(is_ready, state.places.seq_ids, NO_SEQUENCE),
        jnp.where(is_ready, 1 + guesses.counts, 0),
        max_query_length=num_tokens + 1,
        tokens=tokens,
    )
    logits, cache = call_model_for_rows(model, params, tokens, cache, batch)
    logits = logits.astype(jnp.float32).reshape(num_places, num_tokens + 1, -1)
    return cache, batch, logits


def _choose_checked(
    cache: Cache,
    state: GenerationState,
    sampling: Sampling,
    guesses: Guesses,
    logits: jax.Array,
    is_ready: jax.Array,
    make_sampler: Callable[[jax.Array], Sampler],
) -> GenerationState:
    """Choose tokens for as long as guesses are right."""
    Carry = tuple[jax.Array, jax.Array, GenerationState]
    num_tokens = guesses.tokens.shape[1]
    bounds = state.bounds(cache)

    def trip(carry: Carry) -> Carry:
        i, goes_on, state = carry
        state, tokens = choose_more(
            state, bounds, logits[:, i], goes_on, sampling, make_sampler(i)
        )
        guess = guesses.tokens[:, jnp.minimum(i, num_tokens - 1)]
        is_right = (i < guesses.counts) & (tokens == guess)
        runs = state.is_running[state.places.sequences]
        return i + 1, goes_on & is_right & runs, state

    _, _, state = while_loop(
        lambda carry: jnp.any(carry[1]), trip, (jnp.int32(0), is_ready, state)
    )
    return state


def _keep(cache: Cache, batch: Batch, loads: Loads, kept: jax.Array) -> Cache:
    """Cut off the rows behind the first `kept` of each, i32[W], and commit those."""
    lengths = loads.done + kept
    cuts = kept < batch.query_lengths
    seq_ids = jnp.where(cuts, batch.seq_ids, NO_SEQUENCE)
    cache, _ = truncate(cache, seq_ids, lengths)
    shorter = dataclasses.replace(
        batch,
        query_lengths=kept,
        context_lengths=jnp.where(kept > 0, lengths, batch.context_lengths),
        epochs=sequences.epochs(cache.metadata, batch.seq_ids),
    )
    return commit(cache, shorter)
