"""Jitted programs of the engine, their sizes, inputs and reports.

Each program is compiled once for the engine's sizes. `begin_empty` creates a generation
of empty prompts, `exchange` finishes cancelled sequences and enqueues new prompts, and
`run_window` runs some decode steps and reports. They do not communicate with the host;
cache and state are donated.

Symbols: Q prompts and N sequences of the generation, K lanes, P longest prompt, E stop
tokens, F stop sequences of C tokens, S most steps of a window, U most new tokens of a
sequence in a window.
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv import decoding
from jkv.decoding import (
    DecodingOptions,
    Drafter,
    FinishReason,
    GenerationConfig,
    GenerationState,
    Model,
    Prompts,
    Sampling,
    Statistics,
    spread_row_counts,
)
from jkv.logits_processors import LogitsProcessor
from jkv.metadata.requests import check_counts, check_static
from jkv.serving.request.limits import StopSizes
from jkv.serving.request.request import (
    NO_VARIANT,
    RequestState,
    RequestStatus,
    SequenceNews,
)
from jkv.state import Cache

# Number of prompts per call of `exchange`.
NUM_LANES = 16


_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclasses.dataclass(frozen=True)
class DrafterSizes:
    """A drafter without its arrays, as a static argument of the programs.

    A program's file must not contain its functions, so the arrays alone are arguments.
    """

    num_tokens: int
    # Inputs of the program, the same in each run.
    description: str
    structure: jax.tree_util.PyTreeDef = dataclasses.field(repr=False)

    @classmethod
    def of(cls, drafter: Drafter) -> "DrafterSizes":
        structure = jax.tree.structure(drafter)
        # The repr of a model has an address.
        description = _ADDRESS.sub("", str(structure))
        return cls(drafter.num_tokens, description, structure)

    def with_arrays(self, arrays: list[Any]) -> Drafter:
        """Return the drafter with its arrays."""
        drafter: Drafter = jax.tree.unflatten(self.structure, arrays)
        return drafter


class EngineSizes(NamedTuple):
    """Static options of the programs, beside the model and the cache."""

    num_prompts: int  # Q
    max_prompt_tokens: int
    config: GenerationConfig
    num_steps: int  # S
    num_lanes: int  # K, prompts per call of `exchange`
    stops: StopSizes
    drafter: DrafterSizes | None
    max_span: int  # tokens of a span; 0: causal prompts only
    cacheable_spans: bool
    extra_ids: int  # ids past the vocabulary that prompts may have

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the generation, N."""
        return self.num_prompts * self.config.num_samples

    @property
    def max_running(self) -> int:
        assert self.config.max_running is not None
        return self.config.max_running

    @property
    def rolls(self) -> bool:
        """True if full contexts drop tokens."""
        return self.config.roll is not None

    @property
    def max_rows(self) -> int:
        """Rows of the largest step."""
        exact, row_counts = self.config.exact_shape, self.config.row_counts
        if exact is not None:
            return exact.num_rows
        assert row_counts is not None, "find_sizes sets it"
        return row_counts[-1]

    @property
    def max_window_tokens(self) -> int:
        """Largest number of new tokens of a sequence in a window, U."""
        drafted = 0 if self.drafter is None else self.drafter.num_tokens
        return min(self.num_steps * (1 + drafted), self.config.max_new_tokens)


def find_sizes(
    config: GenerationConfig,
    *,
    num_ahead: int | None,
    max_prompt_tokens: int,
    num_steps: int,
    stop_sizes: StopSizes,
    speculate: Drafter | None,
    max_span: int,
    cacheable_spans: bool,
    extra_ids: int,
) -> EngineSizes:
    """Return the sizes of an engine from the arguments of `Engine`."""
    running = config.max_running
    assert running is not None, "Engine requires max_running"
    check_counts(
        max_running=running, num_steps=num_steps, max_prompt_tokens=max_prompt_tokens
    )
    ahead = running if num_ahead is None else num_ahead
    check_static("num_ahead", ahead, 0)
    check_static("max_span", max_span, 0)
    check_static("extra_ids", extra_ids, 0)
    for name, size in stop_sizes._asdict().items():
        check_static(f"stop_sizes.{name}", size, 0)
    num_prompts = running + ahead
    if (exact := config.exact_shape) is not None:
        exact.check_alone(config.row_counts, config.chunk_size)
        exact.check_fits("max_running", running)
    elif config.row_counts is None:
        most_rows = min(config.chunk_size, num_prompts * max_prompt_tokens)
        counts = spread_row_counts(running, most_rows)
        config = dataclasses.replace(config, row_counts=counts)
    return EngineSizes(
        num_prompts=num_prompts,
        max_prompt_tokens=max_prompt_tokens,
        config=config,
        num_steps=num_steps,
        num_lanes=min(NUM_LANES, num_prompts),
        stops=stop_sizes,
        drafter=None if speculate is None else DrafterSizes.of(speculate),
        max_span=max_span,
        cacheable_spans=cacheable_spans,
        extra_ids=extra_ids,
    )


# States encoded in `WindowReport.stages`.
STAGES = (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED)

_WAITING = STAGES.index(RequestStatus.WAITING)
_REASONS = {int(reason): reason for reason in FinishReason}


class Arrivals(NamedTuple):
    """K prompts to enqueue, as numpy arrays."""

    indices: np.ndarray[Any, Any]  # i32[K], index of each prompt, -1 for none
    tokens: np.ndarray[Any, Any]  # i32[K, P], -1 past the end
    limits: np.ndarray[Any, Any]  # i32[K]
    stop_tokens: np.ndarray[Any, Any]  # i32[K, E], -1 for none
    stop_sequences: np.ndarray[Any, Any] | None  # i32[K, F, C], -1 past the end
    num_samples: np.ndarray[Any, Any]  # i32[K]
    salts: np.ndarray[Any, Any]  # i32[K]
    priorities: np.ndarray[Any, Any]  # i32[K]
    variants: np.ndarray[Any, Any]  # i32[K], variant of the logits processor
    sampling: dict[str, np.ndarray[Any, Any]]  # [K, samples], fields of `Sampling`
    spans: np.ndarray[Any, Any] | None  # i32[K, P], end of each token's span, or -1
    rows: np.ndarray[Any, Any] | None  # i32[K], open cache rows to continue, or -1

    @classmethod
    def of(
        cls,
        sizes: EngineSizes,
        # at most K requests, each with the index of the first sample that shares the
        # prompt; the samples have their sequence indices
        dispatched: list[tuple[RequestState, int]],
    ) -> "Arrivals":
        count, samples, stops = sizes.num_lanes, sizes.config.num_samples, sizes.stops

        def filled(value: int, *shape: int) -> np.ndarray[Any, Any]:
            return np.full((count, *shape), value, np.int32)

        arrivals = cls(
            indices=filled(-1),
            tokens=filled(-1, sizes.max_prompt_tokens),
            limits=filled(0),
            stop_tokens=filled(-1, stops.tokens),
            stop_sequences=make_empty_sequences(count, stops),
            num_samples=filled(0),
            salts=filled(0),
            priorities=filled(0),
            variants=filled(NO_VARIANT),
            sampling={
                name: np.zeros((count, samples), dtype)
                for name, dtype in Sampling.dtypes.items()
            },
            spans=filled(-1, sizes.max_prompt_tokens) if sizes.max_span else None,
            rows=filled(-1) if sizes.rolls else None,
        )
        for lane, (state, first) in enumerate(dispatched):
            arrivals._put(lane, state, first, samples)
        return arrivals

    def _put(self, lane: int, state: RequestState, first: int, most: int) -> None:
        request = state.request
        count = min(most, request.n - first)
        self.indices[lane] = state.samples[first].sequence // most
        self.tokens[lane, : len(request.tokens)] = request.tokens
        self.limits[lane] = request.max_new_tokens
        self.stop_tokens[lane, : len(request.stop_tokens)] = request.stop_tokens
        if self.stop_sequences is not None:
            for i, sequence in enumerate(request.stop_sequences):
                self.stop_sequences[lane, i, : len(sequence)] = sequence
        if self.spans is not None and request.spans is not None:
            self.spans[lane, : len(request.spans)] = request.spans
        if self.rows is not None:
            self.rows[lane] = state.samples[first].row
        self.num_samples[lane] = count
        self.salts[lane] = request.salt
        self.priorities[lane] = request.priority
        self.variants[lane] = request.variant
        for name in Sampling.dtypes:
            values = np.asarray(getattr(request.sampling, name))
            self.sampling[name][lane, :count] = values[first : first + count]


class Change(NamedTuple):
    """Input of one call of `exchange`: cancelled sequences and new prompts."""

    arrivals: Arrivals
    cancelled: np.ndarray[Any, Any]  # bool[N]
    # bool[N], sequences whose row is kept when they finish; None if they do not roll.
    parked: np.ndarray[Any, Any] | None = None


def make_empty_sequences(count: int, stops: StopSizes) -> np.ndarray[Any, Any] | None:
    """Return empty stop sequences, i32[count, F, C]; None if the sizes allow none."""
    if not stops.sequences or not stops.length:
        return None
    return np.full((count, stops.sequences, stops.length), -1, np.int32)


class WindowReport(NamedTuple):
    """Report of a window, for all N sequences of the generation."""

    tokens: jax.Array  # i32[N, U], new tokens
    logprobs: jax.Array  # f32[N, U], their log-probabilities
    counts: jax.Array  # i32[N], number of new tokens
    reasons: jax.Array  # i32[N], `FinishReason`
    cached_tokens: jax.Array  # i32[N], prompt tokens hit in the prefix cache
    stages: jax.Array  # i32[N], index in STAGES
    statistics: Statistics  # of the window
    num_free_blocks: jax.Array  # i32[], summed over all groups of layers

    def read_news(self) -> Iterator[SequenceNews]:
        """Return the changed sequences in order; the arrays must be numpy's."""
        # Most queued sequences are unchanged, and there may be many.
        is_new = (self.counts > 0) | (self.reasons != FinishReason.RUNNING)
        rows = np.flatnonzero(is_new | (self.stages != _WAITING))
        arrays = self.tokens, self.logprobs, self.counts, self.reasons, self.stages
        tokens, logprobs, counts, reasons, stages, cached = (
            np.asarray(array)[rows].tolist() for array in (*arrays, self.cached_tokens)
        )
        return map(
            SequenceNews,
            rows.tolist(),
            [row[:count] for row, count in zip(tokens, counts, strict=True)],
            [row[:count] for row, count in zip(logprobs, counts, strict=True)],
            [_REASONS[reason] for reason in reasons],
            [STAGES[stage] for stage in stages],
            cached,
        )


_STATIC = ("model", "sizes")


class Given(NamedTuple):
    """Inputs of each window that it does not change."""

    params: Any
    drafter: list[Any]  # its arrays, none without a drafter
    logits_processor: LogitsProcessor | None


@functools.partial(jax.jit, static_argnames=_STATIC)
def begin_empty(
    model: Model,
    given: Given,
    cache: Cache,
    *,
    sizes: EngineSizes,
) -> tuple[GenerationState, Sampling]:
    """Create the state of a generation with empty prompts only."""
    stops, empty = sizes.stops, (sizes.num_prompts, sizes.max_prompt_tokens)
    options = DecodingOptions(
        logits_processor=given.logits_processor,
        speculate=_restore_drafter(sizes, given),
    )
    # The barrier prevents constant folding, which takes half a minute of compilation
    # for 128 prompts of up to 8,192 tokens.
    rows = jax.lax.optimization_barrier(jnp.full(empty, -1, jnp.int32))
    prompts = Prompts.of(
        rows,
        stop_tokens=jnp.full((sizes.num_prompts, stops.tokens), -1, jnp.int32),
        stop_sequences=make_empty_sequences(sizes.num_prompts, stops),
        variants=NO_VARIANT,
        spans=rows if sizes.max_span else None,
        cacheable_spans=sizes.cacheable_spans,
        max_span=sizes.max_span or None,
        extra_ids=sizes.extra_ids,
    )
    state = decoding.begin(
        model,
        given.params,
        cache,
        prompts,
        generation_config=sizes.config,
        options=options,
    )
    if sizes.rolls:
        state = state.keeping_rows()
    fields = {
        name: jnp.zeros((sizes.num_sequences,), dtype)
        for name, dtype in Sampling.dtypes.items()
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
    # Only now, as a cancelled sequence may keep its row under an index used again.
    if state.kept is not None and arrivals.rows is not None:
        cache, state = state.kept.exchange(
            cache, state, arrivals.indices, arrivals.rows, change.parked
        )
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
    free = _sum_free_blocks(cache)
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
    drafter = _restore_drafter(sizes, given)
    options = DecodingOptions(sampling, given.logits_processor, drafter)
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
        num_free_blocks=_sum_free_blocks(cache),
    )
    return cache, state, report


def count_free_blocks(cache: Cache) -> tuple[jax.Array, ...]:
    """Return the number of free blocks of each group, i32[] each."""
    return tuple(group.free_blocks.count for group in cache.metadata.block_groups)


def _sum_free_blocks(cache: Cache) -> jax.Array:
    """Return the number of free blocks of all groups, i32[]."""
    counts = count_free_blocks(cache) or (jnp.int32(0),)
    return functools.reduce(operator.add, counts)


def _restore_drafter(sizes: EngineSizes, given: Given) -> Drafter | None:
    """Return the drafter with its arrays, None without one."""
    return None if sizes.drafter is None else sizes.drafter.with_arrays(given.drafter)
