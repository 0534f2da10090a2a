"""The loop of `generate` with guesses: each step is a plain one or one that checks.

A step checks guesses only when each text in the cache lacks nothing but its newest
token: prompts are computed by plain steps, and so are texts that were preempted.

Symbols: W places, V tokens in the vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.conditions import when
from jkv.decoding.model import Model
from jkv.decoding.options import Sampling
from jkv.decoding.progress import GenerationState
from jkv.decoding.prompts import find_texts
from jkv.decoding.speculation.acceptance import make_rejection_sampler, sample_rows
from jkv.decoding.speculation.drafting import (
    Drafts,
    begin_drafts,
    draft,
    keep_accepted,
)
from jkv.decoding.speculation.lookup import find_guesses
from jkv.decoding.speculation.options import DraftModel, PromptLookup
from jkv.decoding.speculation.pace import Pace
from jkv.decoding.speculation.verification import (
    Guesses,
    Sampler,
    check_guesses,
    limit_guesses,
)
from jkv.decoding.step import advance, settle_places
from jkv.sharding.loops import while_loop
from jkv.state import Cache

Speculation = PromptLookup | DraftModel


class _Loop(NamedTuple):
    """What the loop carries."""

    cache: Cache
    state: GenerationState
    logits: jax.Array  # f32[W, V], memory for those of a plain step
    pace: Pace
    drafts: Drafts | None  # of a draft model


class _Fixed(NamedTuple):
    """What stays the same from step to step."""

    model: Model
    params: Any
    sampling: Sampling
    options: Speculation


def run_speculatively(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    sampling: Sampling,
    options: Speculation,
) -> tuple[Cache, GenerationState]:
    """Do steps until everything has ended."""
    fixed = _Fixed(model, params, sampling, options)
    drafts = begin_drafts(options, state) if isinstance(options, DraftModel) else None
    pace = Pace.begin(state.places.num_places, options.num_tokens, options.cost)
    logits = jnp.zeros(state.seen.shape, jnp.float32)
    loop = while_loop(
        lambda loop: jnp.any(loop.state.is_running),
        functools.partial(_step, fixed),
        _Loop(cache, state, logits, pace, drafts),
    )
    return loop.cache, loop.state


def _step(fixed: _Fixed, loop: _Loop) -> _Loop:
    """Do a step with guesses or without."""
    loop = loop._replace(pace=loop.pace.follow(loop.state.places.sequences))
    loop, guesses = _guess(fixed, loop)
    is_worth_it = jnp.any(guesses.counts > 0)
    loop = when(is_worth_it, functools.partial(_check, fixed), loop, *guesses)
    loop = when(~is_worth_it, functools.partial(_advance, fixed), loop)
    cache, state = settle_places(loop.cache, loop.state)
    return loop._replace(cache=cache, state=state)


def _advance(fixed: _Fixed, loop: _Loop) -> _Loop:
    """Do a step as without speculation."""
    cache, state, logits = advance(
        fixed.model, fixed.params, loop.cache, loop.state, fixed.sampling, loop.logits
    )
    pace = loop.pace.after_step()
    return loop._replace(cache=cache, state=state, logits=logits, pace=pace)


def _check(fixed: _Fixed, loop: _Loop, *given: jax.Array) -> _Loop:
    """Do a step that checks guesses."""
    guesses, drafts = Guesses(*given), loop.drafts
    before = loop.state.loads(loop.cache).text_lengths
    running = loop.state.places.num_running
    cache, state, accepted = check_guesses(
        fixed.model,
        fixed.params,
        loop.cache,
        loop.state,
        fixed.sampling,
        guesses,
        _choose_sampler(drafts, guesses),
    )
    if drafts is not None:
        drafts = keep_accepted(drafts, before, accepted)
    pace = loop.pace.after_guesses(
        guesses.counts, accepted, running, fixed.options.cost
    )
    return _Loop(cache, state, loop.logits, pace, drafts)


def _choose_sampler(drafts: Drafts | None, guesses: Guesses) -> Sampler:
    """Return how tokens are chosen after guesses."""
    if drafts is None:
        return sample_rows
    return make_rejection_sampler(guesses, drafts.logits)


def _guess(fixed: _Fixed, loop: _Loop) -> tuple[_Loop, Guesses]:
    """Guess for the texts where it pays; for none if the step shall be plain."""
    cache, state, options = loop.cache, loop.state, fixed.options
    places, loads = state.places, state.loads(cache)
    is_ready = places.is_cached & places.is_running
    lengths = state.result.lengths[places.sequences]
    # A first token is drawn for all samples of a prompt, by a plain step.
    is_decoding = jnp.all((loads.count_left(places) <= 1) & (~is_ready | (lengths > 0)))
    Carry = tuple[Guesses, Drafts | None]

    def choose(counts: jax.Array) -> jax.Array:
        return loop.pace.choose(counts, places.num_running, options.cost)

    def guess(carry: Carry) -> Carry:
        drafts = carry[1]
        if isinstance(options, DraftModel):
            assert drafts is not None
            drafts = draft(
                options, drafts, state, loads.text_lengths, is_ready, fixed.sampling
            )
            tokens, counts = drafts.guesses
        else:
            texts, lengths = find_texts(state.prompts, state.result, places.sequences)
            tokens, counts = find_guesses(texts, lengths, options)
        counts = limit_guesses(cache, state, loads, counts)
        counts = jnp.where(choose(counts), counts, 0)
        if drafts is not None:
            # What is not checked may be wrong, and nobody would know.
            drafts = keep_accepted(drafts, loads.text_lengths, counts)
        return Guesses(tokens, counts), drafts

    # To look for guesses takes time too: not where the most there can be would not pay.
    most = jnp.where(is_ready, jnp.int32(options.num_tokens), 0)
    guesses, drafts = when(
        is_decoding & jnp.any(choose(most)),
        guess,
        (Guesses.none(places.num_places, options.num_tokens), loop.drafts),
    )
    return loop._replace(drafts=drafts), guesses
