"""Arrivals: adds prompts to a generation between two windows of steps.

Symbols: N sequences, Q prompts, K prompts of a call, P most prompt tokens.
"""

import dataclasses
from typing import Unpack

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.decoding.processors.rows import (
    as_logits_processor,
    begin_rows,
    check_processor_presence,
    with_variants,
)
from jkv.decoding.sampling.next_token import judge_prompts
from jkv.decoding.scheduler.queue import (
    drop_from_queue,
    list_queue,
    order_queue,
)
from jkv.decoding.scheduler.state import GenerationState
from jkv.decoding.texts.prompts import PromptFields, Prompts
from jkv.decoding.texts.results import FinishReason, Generation
from jkv.decoding.texts.spans import match_spans
from jkv.indexing import gather, scatter
from jkv.logits_processors import LogitsProcessor
from jkv.metadata import mentions, ring
from jkv.metadata.requests import Integers, Texts, broadcast
from jkv.state import Cache, Ring
from jkv.state.entry import takes_cache
from jkv.status import UsageError


@takes_cache()
def add_prompts(
    cache: Cache,
    state: GenerationState,
    indices: Integers,
    prompts: Texts | Prompts,
    *,
    num_samples: Integers | None = None,
    priorities: Integers = 0,
    logits_processor: LogitsProcessor | None = None,
    **fields: Unpack[PromptFields],
) -> GenerationState:
    """Replace finished prompts by new ones and enqueue them.

    New sequences wait behind waiting ones of the same priority. The results of the
    replaced ones are discarded. A server starts with empty prompts and replaces them as
    requests arrive.

    Args:
      cache: the cache.
      state: from `prefill` or `decode`.
      indices: i32[K], prompts of the generation to replace, -1 for none. A prompt with
        an unfinished sequence is left unchanged; of duplicates the first counts.
      prompts: i32[K, P], -1 past the end of each, P as in the first call; or `Prompts`.
        Without limits a prompt gets as many tokens as there is room for. Stop
        conditions have the shape of the first call; without any the old ones stay.
        Spans need spans in the first call, with its `max_span` and `cacheable_spans`.
      num_samples: i32[K], sequences of each prompt to run; the others count as
        CANCELLED. None is all.
      priorities: i32[K] or int; among sequences that have not started, smaller ones
        first.
      logits_processor: as for `begin`.
      fields: the keyword arguments of `Prompts.of`.

    Returns:
      The state; a prompt that cannot start has a finish reason at once.

    Raises:
      ValueError: for arguments of a wrong shape or type.

    Example:
      >>> import jax, jax.numpy as jnp, jkv
      >>> from jkv.decoding import add_prompts, begin, decode
      >>> def count_on(params, tokens, cache, batch):
      ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16))
      >>> nothing = jnp.full((2, 3), -1)
      >>> state = begin(count_on, None, cache, nothing, max_new_tokens=4)
      >>> state = add_prompts(cache, state, [1], jnp.array([[5, 6, 7]]))
      >>> cache, state = decode(count_on, None, cache, state)
      >>> state.result.tokens.tolist()
      [[-1, -1, -1, -1], [8, 9, 10, 11]]
    """
    num_prompts, width = state.prompts.tokens.shape
    (indices,) = broadcast(indices=indices)
    if not isinstance(prompts, Prompts):
        prompts = Prompts.of(prompts, **fields)
    elif fields:
        raise UsageError(
            f"got a Prompts and the keywords {', '.join(fields)}; set them on the "
            f"Prompts, or pass keywords only"
        )
    added, stops = prompts.divide(state.result.tokens.shape[1])
    (order,) = broadcast(added.lengths.shape[0], priorities=priorities)
    added = dataclasses.replace(added, priorities=jnp.asarray(order))
    sizes, why = {"N": len(indices), "P": width}, "as many as indices, P as at first"
    expect("prompts", added.tokens, "N P", sizes, jnp.integer, why=why)
    logits_processor = as_logits_processor(logits_processor)
    check_processor_presence(state.result.processor_state, logits_processor)
    added = with_variants(added, logits_processor)
    spans = match_spans(state.prompts.spans, added.spans, added.tokens)
    added = dataclasses.replace(added, spans=spans)
    is_busy = jnp.any(state.is_running.reshape(num_prompts, -1), axis=1)
    index = jnp.where(indices < 0, num_prompts, indices)
    is_free = ~gather(is_busy, index, fill=True)
    is_free &= mentions.is_first(index, num_prompts)
    index = jnp.where(is_free, index, num_prompts)
    kept = jax.tree.map(lambda old, new: scatter(old, index, new), state.prompts, added)
    if prompts.stops is None:
        stops = state.stops
    else:
        stops = state.stops.replace(index, stops, num_prompts)
    state = dataclasses.replace(state, prompts=kept, stops=stops)
    most = state.num_samples if num_samples is None else num_samples
    (wanted,) = broadcast(len(indices), num_samples=most)
    return _queue_up(cache, state, index, added, jnp.asarray(wanted), logits_processor)


def _queue_up(
    cache: Cache,
    state: GenerationState,  # with the prompts
    index: jax.Array,  # i32[K], prompt indices; Q for none
    added: Prompts,  # K prompts
    wanted: jax.Array,  # i32[K], sequences to start of each
    logits_processor: LogitsProcessor | None,  # their logits processor
) -> GenerationState:
    num_samples, num_sequences = state.num_samples, state.result.lengths.shape[0]
    sample_index = jnp.arange(num_samples, dtype=jnp.int32)[None]
    sequences = (index[:, None] * num_samples + sample_index).reshape(-1)
    bounds = state.progress(cache).bounds
    checks = state.seen.shape[1], logits_processor, state.row_counts[-1]
    reasons = judge_prompts(added, bounds, *checks)
    is_wanted = sample_index < wanted[:, None]
    unwanted = jnp.int32(FinishReason.CANCELLED)
    reasons = jnp.where(is_wanted, reasons[:, None], unwanted).reshape(-1)
    begins = (sequences < num_sequences) & (reasons == FinishReason.RUNNING)
    # Waiting sequences may have been cancelled.
    queue = drop_from_queue(state.queue, ~state.is_running)
    fresh = Generation.empty(
        reasons,
        state.result.tokens.shape[1],
        begin_rows(logits_processor, added, num_samples),
    )
    state = dataclasses.replace(
        state,
        result=state.result.map_sequences(
            lambda old, new: scatter(old, sequences, new), fresh
        ),
        seating_needs=jax.tree.map(jnp.zeros_like, state.seating_needs),
        speculation=state.speculation and state.speculation.forget(sequences),
    )
    queue = ring.push(queue, sequences, begins)
    queue = order_queue(queue, _find_ranks(state, queue))
    return dataclasses.replace(state, queue=queue)


def _find_ranks(state: GenerationState, queue: Ring) -> jax.Array:
    """Return the priority of each sequence, i32[N].

    Samples of a started prompt come first, so that at most one prompt is held.
    """
    num_samples, is_running = state.num_samples, state.is_running
    sequences, waits = list_queue(queue)
    waiting = jnp.where(waits, sequences, len(is_running))
    has_begun = scatter(is_running, waiting, False)
    has_begun |= state.result.lengths > 0
    has_begun = jnp.any(has_begun.reshape(-1, num_samples), axis=1)
    first = jnp.iinfo(jnp.int32).min
    ranks = jnp.where(has_begun, first, state.prompts.priorities)
    return jnp.repeat(ranks, num_samples)
