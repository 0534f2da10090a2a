"""Draft tokens: forced tokens, limits, and the rows of a step.

Symbols: W places, K draft tokens of each, R rows of a step.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.model.runner import locate_rows
from jkv.decoding.sampling.next_token import ProcessorRows
from jkv.decoding.scheduler.state import ActiveSequences, GenerationState
from jkv.decoding.sequences import blocks
from jkv.decoding.sequences.blocks import BlockSize
from jkv.operations import gather, running_sum
from jkv.state import Cache


class DraftTokens(NamedTuple):
    """Draft tokens of each place."""

    tokens: jax.Array  # i32[W, K]
    counts: jax.Array  # i32[W], draft tokens of each
    # i32[W], leading draft tokens that cannot be rejected: no other is allowed
    certain: jax.Array

    @classmethod
    def none(cls, num_places: int, num_tokens: int) -> "DraftTokens":
        nothing = jnp.zeros((num_places,), jnp.int32)
        tokens = jnp.zeros((num_places, num_tokens), jnp.int32)
        return cls(tokens, counts=nothing, certain=nothing)

    def limit(self, counts: jax.Array) -> "DraftTokens":
        """Keep the first `counts` draft tokens of each place, i32[W]."""
        return DraftTokens(self.tokens, counts, jnp.minimum(self.certain, counts))

    def mask(self) -> jax.Array:
        """Return the draft tokens padded with -1, i32[W, K]."""
        column = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]
        return jnp.where(column < self.counts[:, None], self.tokens, -1)


def force_draft_tokens(
    processor: ProcessorRows | None, drafted: DraftTokens
) -> DraftTokens:
    """Replace and extend draft tokens by the tokens a logits processor forces."""
    forced = None if processor is None else processor.find_forced()
    if processor is None or forced is None:
        return drafted
    given = drafted.mask()
    tokens: list[jax.Array] = []
    follows = jnp.ones(drafted.counts.shape, bool)  # all tokens equal the given ones
    is_certain = jnp.ones(drafted.counts.shape, bool)  # and all are forced
    certain = jnp.zeros_like(drafted.counts)
    for column in range(given.shape[1]):
        forced = processor.find_forced()
        assert forced is not None, "`forced` must not become None"
        token = jnp.where(follows, given[:, column], -1)
        token = jnp.where(forced >= 0, forced, token)
        # No draft tokens after the end of a completion.
        token = jnp.where(tokens[-1] < 0, -1, token) if tokens else token
        follows &= token == given[:, column]
        is_certain &= (forced >= 0) & (token >= 0)
        certain += is_certain.astype(jnp.int32)
        tokens.append(token)
        processor = processor.advance(token)
    chosen = jnp.stack(tokens, axis=1)
    counts = jnp.sum(chosen >= 0, axis=1, dtype=jnp.int32)
    return DraftTokens(jnp.maximum(chosen, 0), counts, certain)


class DraftTokenRows(NamedTuple):
    """Place and index of each of R rows."""

    places: jax.Array  # i32[R], the place of its sequence
    before: jax.Array  # i32[R], draft tokens up to and including the row

    @classmethod
    def of(cls, counts: jax.Array, num_rows: int) -> "DraftTokenRows":
        """Locate the rows of places with `counts` rows each, i32[W]."""
        return cls(*locate_rows(counts, jnp.zeros_like(counts), num_rows))


def limit_draft_tokens(
    cache: Cache, state: GenerationState, active: ActiveSequences, counts: jax.Array
) -> jax.Array:
    """Limit draft tokens, i32[W], to unpromised blocks, limits and context length."""
    places, size = state.places, BlockSize(cache.block_size)
    made = gather(state.result.lengths, places.sequences)
    left = gather(state.prompts.limits, active.prompts) - made
    room = cache.max_context_length - active.slots_at_end
    counts = jnp.clip(jnp.minimum(left - 1, room), 0, counts)
    is_ready = places.is_cached & places.is_running
    counts = jnp.where(is_ready, counts, 0)

    if not active.held.mapped:  # no group of layers has blocks
        return counts
    columns = blocks.count_columns(active.slots_at_end, size)
    promised = tuple(jnp.maximum(mapped, columns) for mapped in active.held.mapped)
    needs = blocks.subtract(promised, active.held.mapped)
    needs = tuple(jnp.where(is_ready, need, 0) for need in needs)
    slack = blocks.subtract(blocks.count_free_blocks(cache), blocks.total(needs))
    columns = blocks.count_columns(active.slots_at_end + counts, size)
    more = [jnp.maximum(columns - each, 0) for each in promised]
    fits = blocks.reach(
        slack, tuple(running_sum(jnp.where(is_ready, each, 0)) for each in more)
    )
    owned = functools.reduce(jnp.minimum, promised) * size.tokens
    owned = jnp.maximum(owned - active.slots_at_end, 0)
    return jnp.where(fits, counts, jnp.minimum(counts, owned))


def row_sizes(
    num_places: int,  # W
    num_tokens: int,  # K
) -> tuple[int, ...]:
    """Return the row counts of a verifying step, ascending.

    The last holds all draft tokens of all places. The first holds those of a quarter of
    the places and one row for each other; it is omitted if hardly smaller. Each
    compiles a program.
    """
    most = num_places * (num_tokens + 1)
    few = num_places + num_tokens * -(-num_places // 4)
    return (few, most) if 2 * few <= most else (most,)
