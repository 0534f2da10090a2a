"""The loop of `generate` with guesses: each step is a plain one or one that checks.

A step checks guesses only when each text in the cache lacks nothing but its newest
token: prompts are computed by plain steps, and so are texts that were preempted.

Symbols: W places, V tokens in the vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.decoding.conditions import when
from jkv.decoding.model import Model
from jkv.decoding.options import Sampling
from jkv.decoding.progress import GenerationState
from jkv.decoding.prompts import find_texts
from jkv.decoding.sampling import sample
from jkv.decoding.speculation.lookup import look_up
from jkv.decoding.speculation.options import PromptLookup
from jkv.decoding.speculation.pace import Pace
from jkv.decoding.speculation.verification import (
    Guesses,
    check_guesses,
    limit_guesses,
)
from jkv.decoding.step import advance, settle
from jkv.state import Cache


class _Loop(NamedTuple):
    """What the loop carries."""

    cache: Cache
    state: GenerationState
    logits: jax.Array  # f32[W, V], memory for those of a plain step
    pace: Pace


def run_speculatively(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    sampling: Sampling,
    options: PromptLookup,
) -> tuple[Cache, GenerationState]:
    """Do steps until everything has ended."""

    def plain(loop: _Loop) -> _Loop:
        cache, state, logits = advance(
            model, params, loop.cache, loop.state, sampling, loop.logits
        )
        return _Loop(cache, state, logits, loop.pace.after_step())

    def guessing(loop: _Loop, *given: jax.Array) -> _Loop:
        guesses = Guesses(*given)
        cache, state, accepted = check_guesses(
            model, params, loop.cache, loop.state, sampling, guesses, lambda _: sample
        )
        pace = loop.pace.after_guesses(
            jnp.sum(guesses.counts, dtype=jnp.int32),
            jnp.sum(accepted, dtype=jnp.int32),
            loop.state.places.num_running,
            options.cost,
        )
        return _Loop(cache, state, loop.logits, pace)

    def step(loop: _Loop) -> _Loop:
        guesses = _guess(loop, options)
        num_guesses = jnp.sum(guesses.counts, dtype=jnp.int32)
        num_running = loop.state.places.num_running
        is_worth_it = loop.pace.pays(num_guesses, num_running, options.cost)
        loop = when(is_worth_it, guessing, loop, *guesses)
        loop = when(~is_worth_it, plain, loop)
        cache, state = settle(loop.cache, loop.state)
        return loop._replace(cache=cache, state=state)

    logits = jnp.zeros(state.seen.shape, jnp.float32)
    loop = lax.while_loop(
        lambda loop: jnp.any(loop.state.is_running),
        step,
        _Loop(cache, state, logits, Pace.begin()),
    )
    return loop.cache, loop.state


def _guess(loop: _Loop, options: PromptLookup) -> Guesses:
    """Guess for all places, unless it is not the time for it."""
    cache, state = loop.cache, loop.state
    places, loads = state.places, state.loads(cache)
    is_ready = places.is_cached & places.is_running
    lengths = state.result.lengths[places.sequences]
    # A first token is drawn for all samples of a prompt, by a plain step.
    is_decoding = jnp.all((loads.count_left(places) <= 1) & (~is_ready | (lengths > 0)))

    def guess(_: Guesses) -> Guesses:
        texts, lengths = find_texts(state.prompts, state.result, places.sequences)
        tokens, counts = look_up(texts, lengths, options)
        return Guesses(tokens, limit_guesses(cache, state, loads, counts))

    num_places = places.num_places
    nothing = Guesses(
        jnp.zeros((num_places, options.num_tokens), jnp.int32),
        jnp.zeros((num_places,), jnp.int32),
    )
    return when(is_decoding & (loop.pace.wait == 0), guess, nothing)
