"""One decode step: a token of each running sequence goes in, the next is chosen.

Symbols: B sequences, G most new tokens, V tokens in the vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jkv.decoding.ending import add_reasons, free_ended, keep_last
from jkv.decoding.model import Model, call_model
from jkv.decoding.options import Sampling
from jkv.decoding.results import FinishReason, GenerationState, Statistics
from jkv.decoding.sampling import sample
from jkv.state import Cache
from jkv.status import Status
from jkv.verbs.appending import append
from jkv.verbs.lookups import num_free_blocks
from jkv.verbs.prefixes import commit


def decode_step(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    sampling: Sampling,
) -> tuple[Cache, GenerationState]:
    """Put the last token of each sequence in the cache and choose the next."""
    tokens = state.last_tokens
    cache, batch = append(cache, state.seq_ids, tokens=tokens)
    logits, cache = call_model(model, params, tokens, cache, batch)
    cache = commit(cache, batch)
    # Those without a block wait while any other goes on. When none does, the last ends.
    refused = batch.status == Status.OUT_OF_BLOCKS
    none_moves = ~jnp.any(state.is_running & ~refused)
    waits = refused & ~(keep_last(refused) & none_moves)
    result = state.result._replace(
        reasons=add_reasons(state.result.reasons, batch.status, waits=waits),
        statistics=count_step(state.result.statistics, cache, batch.context_lengths),
    )
    state = dataclasses.replace(state, result=result)
    return choose_tokens(cache, state, logits, batch.query_lengths > 0, sampling)


def choose_tokens(
    cache: Cache,
    state: GenerationState,
    logits: jax.Array,  # f32[B, V]
    served: jax.Array,  # bool[B], the others wait or have ended
    sampling: Sampling,
) -> tuple[Cache, GenerationState]:
    """Record one more token of each served sequence, and free those that have ended."""
    result = state.result
    tokens, logprobs = sample(logits, sampling, result.lengths, seen=state.seen)
    row = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    column = jnp.where(served, result.lengths, result.tokens.shape[1])
    lengths = result.lengths + served.astype(jnp.int32)

    # Of two reasons the later line counts: a stop token that is also the last one.
    stops = jnp.any(tokens[:, None] == state.stop_tokens[None, :], axis=1)
    is_full = lengths >= state.limits
    reasons = result.reasons
    reasons = jnp.where(served & is_full, jnp.int32(FinishReason.LENGTH), reasons)
    reasons = jnp.where(served & stops, jnp.int32(FinishReason.STOP), reasons)
    cache, seq_ids = free_ended(cache, state.seq_ids, reasons)

    seen_token = jnp.where(served, tokens, state.seen.shape[1])
    return cache, dataclasses.replace(
        state,
        result=result._replace(
            tokens=result.tokens.at[row, column].set(tokens, mode="drop"),
            lengths=lengths,
            reasons=reasons,
            logprobs=result.logprobs.at[row, column].set(logprobs, mode="drop"),
        ),
        seq_ids=seq_ids,
        seen=state.seen.at[row, seen_token].set(True, mode="drop"),
    )


def count_step(
    statistics: Statistics, cache: Cache, context_lengths: jax.Array
) -> Statistics:
    """Count a step that has appended and not yet freed."""
    used = jnp.int32(cache.num_blocks) - num_free_blocks(cache)
    empty = jnp.sum(-context_lengths % cache.block_size, dtype=jnp.int32)
    is_peak = used > statistics.peak_blocks
    return statistics._replace(
        num_steps=statistics.num_steps + 1,
        peak_blocks=jnp.where(is_peak, used, statistics.peak_blocks),
        empty_slots=jnp.where(is_peak, empty, statistics.empty_slots),
    )
