"""Guesses are checked: one step computes them all, and tokens are chosen as ever.

The rows of a step are each text's newest token and the guesses behind it, if there are
any. Their logits choose the token after each row as a plain step would, one row after
the other, for as long as the token chosen is the one that was guessed. The rows behind
are cut off.

Symbols: W places, K guesses of each, R rows of a step, V tokens in the vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.choosing import Sampler, choose_more
from jkv.decoding.conditions import when
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
from jkv.decoding.scheduling.rows import choose_size, locate_rows
from jkv.decoding.step import Computed, count_step, note_refusals
from jkv.metadata.prefixes import sequences
from jkv.metadata.xla_cpu import running_sum
from jkv.sharding.loops import while_loop
from jkv.state import NO_SEQUENCE, Batch, Cache
from jkv.verbs.appending import append
from jkv.verbs.prefixes import commit
from jkv.verbs.truncation import truncate
from jkv.verbs.work_lists import with_work_lists


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


def row_sizes(num_places: int, num_tokens: int) -> tuple[int, ...]:
    """Return the rows that a step with guesses may have, ascending.

    The last holds all guesses of all places. The first holds those of a quarter of the
    places, and a row for each other; where it would hardly be smaller there is none.
    Each is a program to compile.

    Args:
      num_places: W.
      num_tokens: K.
    """
    most = num_places * (num_tokens + 1)
    few = num_places + num_tokens * -(-num_places // 4)
    return (few, most) if 2 * few <= most else (most,)


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
    computed = Computed(logits, batch.status, jnp.minimum(num_rows, 1))
    state = count_step(cache, state, loads, computed)
    state = note_refusals(state, computed)
    before = state.result.lengths[places.sequences]
    state = _choose_checked(
        cache, state, sampling, guesses, batch, logits, make_sampler
    )
    made = state.result.lengths[places.sequences] - before
    made = jnp.where(num_rows > 0, made, 0)
    cache = _keep(cache, batch, loads, jnp.minimum(made, num_rows))
    accepted = jnp.maximum(made - 1, 0)
    result = state.result.add_counts(
        draft_tokens=jnp.sum(jnp.maximum(num_rows - 1, 0), dtype=jnp.int32),
        accepted_tokens=jnp.sum(accepted, dtype=jnp.int32),
        checking_steps=jnp.int32(1),
    )
    return cache, dataclasses.replace(state, result=result), accepted


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

    The step is planned for the most rows that there can be; the model computes the
    first of them, as many as the smallest size that holds the guesses.

    Returns:
      The cache, the batch of the most rows R, and the logits after each row, f32[R, V].
    """
    sizes = row_sizes(*guesses.tokens.shape)
    counts = jnp.where(is_ready, 1 + guesses.counts, 0)
    tokens = _tokens_of_rows(state, loads, guesses, counts, sizes[-1])
    seq_ids = jnp.where(is_ready, state.places.seq_ids, NO_SEQUENCE)
    cache, batch = append(cache, seq_ids, counts, capacity=sizes[-1], tokens=tokens)
    # Each size has lists of work of its own.
    batch = batch.with_work_lists((None,) * len(batch.groups))
    leaves, structure = jax.tree.flatten(batch)
    Carry = tuple[Cache, jax.Array]

    def program(size: int) -> Callable[..., Carry]:
        def compute(carry: Carry, tokens: jax.Array, *leaves: jax.Array) -> Carry:
            cache, logits = carry
            first = jax.tree.unflatten(structure, leaves).first_rows(size)
            first = with_work_lists(cache, first)
            found, cache = call_model_for_rows(
                model, params, tokens[:size], cache, first
            )
            return cache, logits.at[:size].set(found.astype(jnp.float32))

        return compute

    logits = jnp.zeros((sizes[-1], state.seen.shape[1]), jnp.float32)
    carry, chosen = (cache, logits), choose_size(jnp.sum(counts), sizes)
    for i, size in enumerate(sizes):
        carry = when(chosen == i, program(size), carry, tokens, *leaves)
    return carry[0], batch, carry[1]


def _tokens_of_rows(
    state: GenerationState,
    loads: Loads,
    guesses: Guesses,
    counts: jax.Array,
    num_rows: int,
) -> jax.Array:
    """Return the newest token of each text and the guesses behind it, i32[R]."""
    newest = find_tokens(
        state.prompts, state.result, state.places.sequences, loads.done
    )
    of_place = jnp.concatenate([newest[:, None], guesses.tokens], axis=1)
    owner, guess = locate_rows(counts, jnp.zeros_like(counts), num_rows)
    return of_place.at[owner, guess].get(mode="clip")


def _choose_checked(
    cache: Cache,
    state: GenerationState,
    sampling: Sampling,
    guesses: Guesses,
    batch: Batch,
    logits: jax.Array,
    make_sampler: Callable[[jax.Array], Sampler],
) -> GenerationState:
    """Choose tokens for as long as guesses are right."""
    Carry = tuple[jax.Array, jax.Array, GenerationState]
    num_tokens = guesses.tokens.shape[1]
    bounds = state.bounds(cache)

    def trip(carry: Carry) -> Carry:
        i, goes_on, state = carry
        after = logits.at[batch.query_starts + i].get(mode="clip")
        state, tokens = choose_more(
            state, bounds, after, goes_on, sampling, make_sampler(i)
        )
        guess = guesses.tokens[:, jnp.minimum(i, num_tokens - 1)]
        is_right = (i < guesses.counts) & (tokens == guess)
        runs = state.is_running[state.places.sequences]
        return i + 1, goes_on & is_right & runs, state

    is_ready = batch.query_lengths > 0
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
