"""Jitted programs of the engine, compiled once for its sizes.

`begin_empty` creates a generation of empty prompts, `exchange` finishes cancelled
sequences and enqueues new prompts, and `run_window` runs some decode steps and reports.
They do not communicate with the host; cache and state are donated.

Symbols: N sequences of the generation, S most steps of a window.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv import decoding
from jkv.decoding import DecodingOptions, Prompts
from jkv.decoding.model.protocol import Model
from jkv.decoding.sampling.options import SAMPLING_DTYPES, Sampling
from jkv.decoding.scheduler.state import GenerationState
from jkv.decoding.speculation.options import DraftModel, PromptLookup
from jkv.decoding.texts.blocks import count_free_blocks, sum_groups
from jkv.decoding.texts.results import Statistics
from jkv.logits_processors import LogitsProcessor
from jkv.serving.device.sizes import DraftSizes, EngineSizes
from jkv.serving.device.transfers import Change, WindowReport, make_empty_sequences
from jkv.serving.request.request import NO_VARIANT
from jkv.state import Cache

_STATIC = ("model", "sizes")


class Given(NamedTuple):
    """Inputs of each window that it does not change."""

    params: Any
    draft_params: Any  # None without a draft model
    logits_processor: LogitsProcessor | None


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="draft_cache")
def begin_empty(
    model: Model,
    given: Given,
    cache: Cache,
    draft_cache: Cache | None,
    *,
    sizes: EngineSizes,
) -> tuple[GenerationState, Sampling]:
    """Create the state of a generation with empty prompts only."""
    stops, empty = sizes.stops, (sizes.num_prompts, sizes.max_prompt_tokens)
    options = DecodingOptions(
        logits_processor=given.logits_processor,
        speculate=_restore_guessing(sizes, given, draft_cache),
    )
    # The barrier prevents constant folding, which takes half a minute of compilation
    # for 128 prompts of up to 8,192 tokens.
    texts = jax.lax.optimization_barrier(jnp.full(empty, -1, jnp.int32))
    prompts = Prompts.of(
        texts,
        stop_tokens=jnp.full((sizes.num_prompts, stops.tokens), -1, jnp.int32),
        stop_sequences=make_empty_sequences(sizes.num_prompts, stops),
        variants=NO_VARIANT,
        spans=texts if sizes.max_span else None,
        cacheable_spans=sizes.cacheable_spans,
        max_span=sizes.max_span or None,
    )
    state = decoding.begin(
        model,
        given.params,
        cache,
        prompts,
        generation_config=sizes.config,
        options=options,
    )
    fields = {
        name: jnp.zeros((sizes.num_sequences,), dtype)
        for name, dtype in SAMPLING_DTYPES.items()
    }
    return state, Sampling(**fields)


@functools.partial(jax.jit, donate_argnames=("cache", "state", "sampling"))
def exchange(
    cache: Cache,
    state: GenerationState,
    sampling: Sampling,
    change: Change,
    logits_processor: LogitsProcessor | None,
) -> tuple[Cache, GenerationState, Sampling, jax.Array]:  # i32[], free blocks
    """Cancel sequences, then enqueue prompts: an index may be free only after that."""
    arrivals = change.arrivals
    cache, state = decoding.cancel(cache, state, jnp.asarray(change.cancelled))
    indices, samples = jnp.asarray(arrivals.indices), state.num_samples
    spans = state.prompts.spans
    state = decoding.add_prompts(
        cache,
        state,
        indices,
        jnp.asarray(arrivals.tokens),
        limits=arrivals.limits,
        stop_tokens=arrivals.stop_tokens,
        stop_sequences=arrivals.stop_sequences,
        num_samples=arrivals.num_samples,
        salts=arrivals.salts,
        priorities=arrivals.priorities,
        logits_processor=logits_processor,
        variants=NO_VARIANT if logits_processor is None else arrivals.variants,
        spans=None if spans is None else jnp.asarray(arrivals.spans),
        cacheable_spans=spans is not None and spans.cacheable,
        max_span=None if spans is None else spans.longest,
    )
    past_the_end = state.result.lengths.shape[0]
    first = jnp.where(indices < 0, past_the_end, indices * samples)
    sequences = first[:, None] + jnp.arange(samples, dtype=jnp.int32)[None]
    options = {
        name: getattr(sampling, name).at[sequences].set(values, mode="drop")
        for name, values in arrivals.sampling.items()
    }
    free = sum_groups(count_free_blocks(cache))
    return cache, state, Sampling(**options), free


preempt_all = jax.jit(decoding.preempt, donate_argnames=("cache", "state"))


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=("cache", "state"))
def run_window(
    model: Model,
    given: Given,
    cache: Cache,
    state: GenerationState,
    sampling: Sampling,
    num_steps: jax.Array,  # i32[], at most S
    *,
    sizes: EngineSizes,
) -> tuple[Cache, GenerationState, WindowReport]:
    """Run steps while a sequence is unfinished, and report the new tokens."""
    starts = state.result.lengths
    # Restarting the counters each window keeps them within 32 bits.
    result = state.result._replace(statistics=Statistics.zeros())
    state = dataclasses.replace(state, result=result)
    guessing = state.speculation
    draft_cache = None if guessing is None else guessing.draft_cache
    speculate = _restore_guessing(sizes, given, draft_cache)
    options = DecodingOptions(sampling, given.logits_processor, speculate)
    cache, state = decoding.decode(
        model, given.params, cache, state, num_steps=num_steps, options=options
    )
    result, places = state.result, state.places
    ahead = jnp.arange(sizes.max_window_tokens, dtype=jnp.int32)[None]
    sequence = jnp.arange(sizes.num_sequences, dtype=jnp.int32)[:, None]
    column = starts[:, None] + ahead
    is_started, is_running = places.is_started, places.is_running
    stage = 2 * is_started.astype(jnp.int32) - is_running.astype(jnp.int32)
    at = jnp.where(is_started, places.sequences, sizes.num_sequences)
    report = WindowReport(
        tokens=result.tokens.at[sequence, column].get(mode="clip"),
        logprobs=result.logprobs.at[sequence, column].get(mode="clip"),
        counts=result.lengths - starts,
        reasons=result.reasons,
        cached_tokens=result.cached_tokens,
        stages=jnp.zeros_like(starts).at[at].set(stage, mode="drop"),
        statistics=result.statistics,
        num_free_blocks=sum_groups(count_free_blocks(cache)),
    )
    return cache, state, report


def _restore_guessing(
    sizes: EngineSizes, given: Given, cache: Cache | None
) -> PromptLookup | DraftModel | None:
    """Rebuild the speculation options with the draft model's arrays."""
    guesses = sizes.guesses
    if not isinstance(guesses, DraftSizes):
        return guesses
    assert cache is not None
    return DraftModel(**vars(guesses), params=given.draft_params, cache=cache)
