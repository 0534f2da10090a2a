"""Auxiliary hidden states of the target, kept for a drafter between steps.

A drafter's row needs the hidden states of the row before it. The cache stores none, so
the loop keeps those of each place's newest cached token. A sequence that arrives
without them, as after a prefix cache hit, computes its last cached token again; the
drafter's keys of that token are stored already and stay.

Symbols: W places, Q prompts, A width of the hidden states.
"""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.model.drafter import Drafter, Follower
from jkv.decoding.scheduler.state import ActiveSequences, GenerationState
from jkv.decoding.sequences.blocks import (
    Held,
    count_cached,
    count_free_blocks,
    reach,
    subtract,
    total,
)
from jkv.metadata import tables
from jkv.operations import gather, scatter
from jkv.state import NO_SEQUENCE, Cache
from jkv.verbs.branching import truncate


class HiddenRows(NamedTuple):
    """The hidden states of the newest cached token of each place."""

    rows: jax.Array  # f32[W, A]
    sequences: jax.Array  # i32[W], the sequence that they belong to, -1 for none
    lengths: jax.Array  # i32[W], its computed tokens then
    # f32[Q, A], of the last token of each prompt, from which samples are forked; None
    # for one sample of each.
    prompt_ends: jax.Array | None

    @classmethod
    def empty(cls, state: GenerationState, width: int) -> "HiddenRows":
        num_places, num_prompts = state.places.num_places, len(state.prompts.lengths)
        ends = None
        if state.num_samples > 1:
            ends = jnp.zeros((num_prompts, width), jnp.float32)
        return cls(
            rows=jnp.zeros((num_places, width), jnp.float32),
            sequences=jnp.full((num_places,), NO_SEQUENCE, jnp.int32),
            lengths=jnp.zeros((num_places,), jnp.int32),
            prompt_ends=ends,
        )

    def forget(self, sequences: jax.Array) -> "HiddenRows":
        """Forget sequences, i32[K], that are replaced by new ones."""
        return self._replace(sequences=without(self.sequences, sequences))

    def read(
        self, state: GenerationState, active: ActiveSequences
    ) -> tuple[jax.Array, jax.Array]:
        """Return the hidden states of each place, f32[W, A], and if known, bool[W].

        They are zeros at the start of a sequence, and where they are unknown.
        """
        is_known = self.sequences == state.places.sequences
        is_known &= self.lengths == active.done
        rows = self.rows
        if self.prompt_ends is not None:
            is_fork = ~is_known & (active.done == active.prompt_lengths)
            ends = gather(self.prompt_ends, active.prompts)
            rows = jnp.where(is_fork[:, None], ends, rows)
            is_known |= is_fork
        has_rows = is_known & (active.done > 0)
        return jnp.where(has_rows[:, None], rows, 0.0), is_known | (active.done == 0)

    def note(
        self,
        state: GenerationState,  # before the step
        active: ActiveSequences,  # before the step
        num_rows: jax.Array,  # i32[W], rows that stay
        rows: jax.Array,  # f32[W, A], of the last of them; arbitrary without rows
    ) -> "HiddenRows":
        """Return the hidden states after a step."""
        has_rows, lengths = num_rows > 0, active.done + num_rows
        sequences = state.places.sequences
        ends = self.prompt_ends
        if ends is not None:
            is_end = has_rows & (lengths == active.prompt_lengths)
            prompt = jnp.where(is_end, active.prompts, ends.shape[0])
            ends = scatter(ends, prompt, rows)
        return HiddenRows(
            rows=jnp.where(has_rows[:, None], rows, self.rows),
            sequences=jnp.where(has_rows, sequences, self.sequences),
            lengths=jnp.where(has_rows, lengths, self.lengths),
            prompt_ends=ends,
        )


def without(known: jax.Array, sequences: jax.Array) -> jax.Array:
    """Return the known sequences, i32[W], with -1 for those in `sequences`, i32[K]."""
    is_replaced = jnp.any(known[:, None] == sequences[None], axis=1)
    return jnp.where(is_replaced, NO_SEQUENCE, known)


def can_recall(cache: Cache, *, opens: bool) -> bool:
    """Return True if sequences may compute their last cached tokens again; static.

    Args:
      cache: the cache; a recurrent state cannot be cut by a token.
      opens: the loop opens its sequences, and knows their tokens.
    """
    if cache.metadata.has_states:
        return False
    return opens or (cache.metadata.records_tokens and cache.block_size > 1)


def recall_last_tokens(
    cache: Cache, state: GenerationState
) -> tuple[Cache, GenerationState]:
    """Cut the last cached token of open sequences, to be computed again.

    A sequence is left as it is if its tokens are unknown, if it has blocks in reserve,
    which a cut would return, or if the pool has no block for the copy of a shared one.
    The first token of a block is cut with the one before it, since its block, and the
    drafter's keys there, would be gone.
    """
    places, size = state.places, cache.block_size
    before = state.before
    assert before is not None
    lengths = count_cached(cache, places.seq_ids)
    back = jnp.stack([lengths - 2, lengths - 1], axis=1)
    recalled = _read_tokens(cache, places.seq_ids, back)
    is_whole = jax.lax.rem(lengths, jnp.int32(size)) == 1
    is_known = (recalled[:, 1] >= 0) & (~is_whole | (recalled[:, 0] >= 0))
    held = Held.of(cache, places.seq_ids)
    used = -(-lengths // size)
    has_reserve = [mapped > used for mapped in held.mapped]
    is_cut = places.is_cached & (lengths > 0) & is_known
    is_cut &= ~functools.reduce(operator.or_, has_reserve, jnp.zeros_like(is_cut))
    needs = total(state.demand(cache, state.active(cache)))
    copies = jnp.sum(is_cut, dtype=jnp.int32)
    free = subtract(count_free_blocks(cache), needs)
    is_cut &= reach(free, tuple(copies for _ in free))
    cut = jnp.where(is_whole, 2, 1)
    seq_ids = jnp.where(is_cut, places.seq_ids, NO_SEQUENCE)
    cache, _ = truncate(cache, seq_ids, jnp.maximum(lengths - cut, 0))
    rows = jnp.zeros((before.shape[0], 2), jnp.int32)
    is_here = places.is_cached
    sequence = jnp.where(is_here, places.sequences, before.shape[0])
    recalled = scatter(rows, sequence, recalled)
    return cache, dataclasses.replace(state, recalled=recalled)


def _read_tokens(cache: Cache, seq_ids: jax.Array, slots: jax.Array) -> jax.Array:
    """Return recorded tokens of sequences, i32[W], at slots, i32[W, C]; -1 below 0."""
    group = cache.metadata.leading
    assert group.tokens is not None, "`can_recall` requires recorded tokens"
    column, offset = tables.locate(jnp.maximum(slots, 0), group.block_size)
    row = jnp.broadcast_to(seq_ids[:, None], slots.shape)
    block = tables.blocks_at(group, row, column)
    return jnp.where(slots >= 0, gather(group.tokens, (block, offset)), -1)


def follow(
    drafter: Drafter,
    hidden: HiddenRows | None,  # None without auxiliary layers
    state: GenerationState,
    active: ActiveSequences,
) -> Follower | None:
    """Return the drafter behind a step; None if it needs no updates."""
    num_places = state.places.num_places
    is_stored = jnp.zeros((num_places,), bool)
    if hidden is None:
        if not drafter.groups:
            return None
        nothing = jnp.zeros((num_places, 0), jnp.float32)
        return Follower(drafter, nothing, is_stored)
    previous, is_known = hidden.read(state, active)
    if state.recomputes_last:
        is_stored = ~is_known
        if state.before is not None:  # only sequences that were cut by a token
            before = gather(state.before, state.places.sequences)
            is_stored &= active.done < before
    return Follower(drafter, previous, is_stored)
