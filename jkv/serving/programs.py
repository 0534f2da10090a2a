"""What runs on the device: three programs, compiled once for an engine's sizes.

`begin_empty` makes a generation of empty prompts, `exchange` lets sequences go and
others come, and `run_window` does some steps and reports. Nothing here asks the host;
cache and state are donated.

Symbols: Q prompts, N sequences of the generation, K lanes, E stop tokens, F stop
sequences of C tokens, S steps of a window at most, U new tokens of a sequence in one.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv import decoding
from jkv.decoding.model.protocol import Model
from jkv.decoding.sampling.options import SAMPLING_DTYPES, Sampling
from jkv.decoding.scheduler.state import GenerationState
from jkv.decoding.speculation.options import DraftModel, PromptLookup
from jkv.decoding.texts.blocks import count_free_blocks, sum_groups
from jkv.decoding.texts.results import Statistics
from jkv.serving.book import Part
from jkv.serving.submission import StopSizes
from jkv.serving.window_report import WindowReport
from jkv.state import Cache


class DraftSizes(NamedTuple):
    """What programs are compiled for of a `DraftModel`, beside model and arrays."""

    num_tokens: int
    cost: float


def find_guess_sizes(
    speculate: PromptLookup | DraftModel | None,
) -> PromptLookup | DraftSizes | None:
    """Return what programs are compiled for of a way to guess."""
    if isinstance(speculate, DraftModel):
        return DraftSizes(speculate.num_tokens, speculate.cost)
    return speculate


class EngineSizes(NamedTuple):
    """Everything that the programs are compiled for, beside model and cache."""

    num_prompts: int  # Q
    num_samples: int  # sequences of a prompt
    max_prompt_tokens: int
    max_new_tokens: int
    max_running: int
    row_counts: tuple[int, ...]
    num_steps: int  # S
    num_lanes: int  # K, prompts that one call of `exchange` takes
    stops: StopSizes
    guesses: PromptLookup | DraftSizes | None

    @property
    def num_sequences(self) -> int:
        """Sequences of the generation, N."""
        return self.num_prompts * self.num_samples

    @property
    def max_window_tokens(self) -> int:
        """Most new tokens of a sequence in a window, U."""
        guesses = 0 if self.guesses is None else self.guesses.num_tokens
        return min(self.num_steps * (1 + guesses), self.max_new_tokens)


class Arrivals(NamedTuple):
    """K prompts that enter the generation, in numpy."""

    prompts: np.ndarray[Any, Any]  # i32[K], which they are, -1 for none
    tokens: np.ndarray[Any, Any]  # i32[K, P], -1 past the end
    limits: np.ndarray[Any, Any]  # i32[K]
    stop_tokens: np.ndarray[Any, Any]  # i32[K, E], -1 for none
    stop_sequences: np.ndarray[Any, Any] | None  # i32[K, F, C], -1 past the end
    num_samples: np.ndarray[Any, Any]  # i32[K]
    salts: np.ndarray[Any, Any]  # i32[K]
    priorities: np.ndarray[Any, Any]  # i32[K]
    sampling: dict[str, np.ndarray[Any, Any]]  # [K, samples], fields of `Sampling`

    @classmethod
    def of(cls, sizes: EngineSizes, parts: list[Part]) -> "Arrivals":
        """Take what parts of requests, at most K, ask for."""
        count, samples, stops = sizes.num_lanes, sizes.num_samples, sizes.stops

        def filled(value: int, *shape: int) -> np.ndarray[Any, Any]:
            return np.full((count, *shape), value, np.int32)

        arrivals = cls(
            prompts=filled(-1),
            tokens=filled(-1, sizes.max_prompt_tokens),
            limits=filled(0),
            stop_tokens=filled(-1, stops.tokens),
            stop_sequences=_empty_sequences(count, stops),
            num_samples=filled(0),
            salts=filled(0),
            priorities=filled(0),
            sampling={
                name: np.zeros((count, samples), dtype)
                for name, dtype in SAMPLING_DTYPES.items()
            },
        )
        for lane, part in enumerate(parts):
            arrivals._put(lane, part)
        return arrivals

    def _put(self, lane: int, part: Part) -> None:
        request = part.record.request
        self.prompts[lane] = part.prompt
        self.tokens[lane, : len(request.tokens)] = request.tokens
        self.limits[lane] = request.max_new_tokens
        self.stop_tokens[lane, : len(request.stop_tokens)] = request.stop_tokens
        if self.stop_sequences is not None:
            for i, sequence in enumerate(request.stop_sequences):
                self.stop_sequences[lane, i, : len(sequence)] = sequence
        self.num_samples[lane] = part.count
        self.salts[lane] = request.salt
        self.priorities[lane] = request.priority
        for name, values in request.sampling.items():
            mine = values[part.first : part.first + part.count]
            self.sampling[name][lane, : part.count] = mine


_STATIC = ("model", "draft_model", "sizes")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="draft_cache")
def begin_empty(
    model: Model,
    params: Any,
    cache: Cache,
    draft_params: Any,
    draft_cache: Cache | None,
    *,
    draft_model: Model | None,
    sizes: EngineSizes,
) -> tuple[GenerationState, Sampling]:
    """Begin a generation in which nobody waits."""
    stops, num_sequences = sizes.stops, sizes.num_sequences
    speculate = _restore_guessing(sizes, draft_model, draft_params, draft_cache)
    state = decoding.begin(
        model,
        params,
        cache,
        jnp.full((sizes.num_prompts, sizes.max_prompt_tokens), -1, jnp.int32),
        max_new_tokens=sizes.max_new_tokens,
        stop_tokens=jnp.full((sizes.num_prompts, stops.tokens), -1, jnp.int32),
        stop_sequences=_empty_sequences(sizes.num_prompts, stops),
        num_samples=sizes.num_samples,
        max_running=sizes.max_running,
        row_counts=sizes.row_counts,
        speculate=speculate,
    )
    fields = {
        name: jnp.zeros((num_sequences,), dtype)
        for name, dtype in SAMPLING_DTYPES.items()
    }
    return state, Sampling(**fields)


@functools.partial(jax.jit, donate_argnames=("cache", "state", "sampling"))
def exchange(
    cache: Cache,
    state: GenerationState,
    sampling: Sampling,
    arrivals: Arrivals,
    cancelled: jax.Array,  # bool[N]
) -> tuple[Cache, GenerationState, Sampling]:
    """End what was cancelled, and let prompts wait, in its place perhaps."""
    cache, state = decoding.cancel(cache, state, cancelled)
    prompts, samples = jnp.asarray(arrivals.prompts), state.num_samples
    state = decoding.add_prompts(
        cache,
        state,
        prompts,
        jnp.asarray(arrivals.tokens),
        limits=arrivals.limits,
        stop_tokens=arrivals.stop_tokens,
        stop_sequences=arrivals.stop_sequences,
        num_samples=arrivals.num_samples,
        salts=arrivals.salts,
        priorities=arrivals.priorities,
    )
    nobody = state.result.lengths.shape[0]
    first = jnp.where(prompts < 0, nobody, prompts * samples)
    sequences = first[:, None] + jnp.arange(samples, dtype=jnp.int32)[None]
    fields = {
        name: getattr(sampling, name).at[sequences].set(values, mode="drop")
        for name, values in arrivals.sampling.items()
    }
    return cache, state, Sampling(**fields)


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=("cache", "state"))
def run_window(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    sampling: Sampling,
    num_steps: jax.Array,  # i32[], at most S
    draft_params: Any,
    *,
    draft_model: Model | None,
    sizes: EngineSizes,
) -> tuple[Cache, GenerationState, WindowReport]:
    """Do steps until nobody goes on, and report what is new."""
    starts = state.result.lengths
    # Counted from nothing each time, no number grows past 32 bits.
    result = state.result._replace(statistics=Statistics.zeros())
    state = dataclasses.replace(state, result=result)
    guessing = state.speculation
    draft_cache = None if guessing is None else guessing.draft_cache
    speculate = _restore_guessing(sizes, draft_model, draft_params, draft_cache)
    cache, state = decoding.decode(
        model,
        params,
        cache,
        state,
        sampling=sampling,
        num_steps=num_steps,
        speculate=speculate,
    )
    result, places = state.result, state.places
    ahead = jnp.arange(sizes.max_window_tokens, dtype=jnp.int32)[None]
    sequence = jnp.arange(sizes.num_sequences, dtype=jnp.int32)[:, None]
    column = starts[:, None] + ahead
    stage = 2 * places.is_started.astype(jnp.int32) - places.is_running.astype(
        jnp.int32
    )
    at = jnp.where(places.is_started, places.sequences, sizes.num_sequences)
    return (
        cache,
        state,
        WindowReport(
            tokens=result.tokens.at[sequence, column].get(mode="clip"),
            logprobs=result.logprobs.at[sequence, column].get(mode="clip"),
            counts=result.lengths - starts,
            reasons=result.reasons,
            stages=jnp.zeros_like(starts).at[at].set(stage, mode="drop"),
            statistics=result.statistics,
            num_free_blocks=sum_groups(count_free_blocks(cache)),
        ),
    )


def _restore_guessing(
    sizes: EngineSizes,
    draft_model: Model | None,
    draft_params: Any,
    draft_cache: Cache | None,
) -> PromptLookup | DraftModel | None:
    """Return how tokens are guessed, put together again."""
    if not isinstance(sizes.guesses, DraftSizes):
        return sizes.guesses
    assert draft_model is not None and draft_cache is not None
    return DraftModel(
        model=draft_model,
        params=draft_params,
        cache=draft_cache,
        **sizes.guesses._asdict(),
    )


def _empty_sequences(count: int, stops: StopSizes) -> np.ndarray[Any, Any] | None:
    """Return stop sequences without a token, i32[count, F, C]; None without any."""
    if not stops.sequences or not stops.length:
        return None
    return np.full((count, stops.sequences, stops.length), -1, np.int32)
