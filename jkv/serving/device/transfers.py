"""Inputs of the device between two windows, and the report of each window.

Symbols: Q prompts and N sequences of the generation, K lanes, P longest prompt, E stop
tokens, F stop sequences of C tokens, U most new tokens of a sequence in a window.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jkv.decoding.sampling.options import SAMPLING_DTYPES
from jkv.decoding.texts.results import FinishReason, Statistics
from jkv.serving.device.sizes import EngineSizes
from jkv.serving.request.limits import StopSizes
from jkv.serving.request.request import NO_VARIANT
from jkv.serving.request.state import RequestState, RequestStatus, SequenceNews

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
                for name, dtype in SAMPLING_DTYPES.items()
            },
            spans=filled(-1, sizes.max_prompt_tokens) if sizes.max_span else None,
        )
        for lane, (state, first) in enumerate(dispatched):
            arrivals._put(lane, state, first, samples)
        return arrivals

    def _put(
        self, lane: int, state: RequestState, first: int, num_samples: int
    ) -> None:
        request = state.request
        count = min(num_samples, request.n - first)
        self.indices[lane] = state.samples[first].sequence // num_samples
        self.tokens[lane, : len(request.tokens)] = request.tokens
        self.limits[lane] = request.max_new_tokens
        self.stop_tokens[lane, : len(request.stop_tokens)] = request.stop_tokens
        if self.stop_sequences is not None:
            for i, sequence in enumerate(request.stop_sequences):
                self.stop_sequences[lane, i, : len(sequence)] = sequence
        if self.spans is not None and request.spans is not None:
            self.spans[lane, : len(request.spans)] = request.spans
        self.num_samples[lane] = count
        self.salts[lane] = request.salt
        self.priorities[lane] = request.priority
        self.variants[lane] = request.variant
        for name in SAMPLING_DTYPES:
            values = np.asarray(getattr(request.sampling, name))
            self.sampling[name][lane, :count] = values[first : first + count]


class Change(NamedTuple):
    """Input of one call of `exchange`: cancelled sequences and new prompts."""

    arrivals: Arrivals
    cancelled: np.ndarray[Any, Any]  # bool[N]


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
