"""The loop of `generate` with guesses: each step is a plain one or one that checks.

A step checks guesses only when each text in the cache lacks nothing but its newest
token: prompts are computed by plain steps, and so are texts that were preempted.

Symbols: W places, V tokens in the vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.choosing import Sampler
from jkv.decoding.conditions import when
from jkv.decoding.model import Model
from jkv.decoding.options import Sampling
from jkv.decoding.progress import GenerationState
from jkv.decoding.prompts import find_texts
from jkv.decoding.sampling import sample
from jkv.decoding.speculation.acceptance import make_rejection_sampler
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


def run_speculatively(
    model: Model,
    params: Any,
    cache: Cache,
    state: GenerationState,
    sampling: Sampling,
    options: Speculation,
) -> tuple[Cache, GenerationState]:
    """Do steps until everything has ended."""

    def plain(loop: _Loop) -> _Loop:
        cache, state, logits = advance(
            model, params, loop.cache, loop.state, sampling, loop.logits
        )
        pace = loop.pace.after_step()
        return loop._replace(cache=cache, state=state, logits=logits, pace=pace)

    def checking(loop: _Loop, *given: jax.Array) -> _Loop:
        guesses, drafts = Guesses(*given), loop.drafts
        before = loop.state.loads(loop.cache).text_lengths
        cache, state, accepted = check_guesses(
            model,
            params,
            loop.cache,
            loop.state,
            sampling,
            guesses,
            _choose_sampler(drafts, guesses),
        )
        if drafts is not None:
            drafts = keep_accepted(drafts, before, accepted)
        pace = loop.pace.after_guesses(
            jnp.sum(guesses.counts, dtype=jnp.int32),
            jnp.sum(accepted, dtype=jnp.int32),
            loop.state.places.num_running,
            options.cost,
        )
        return _Loop(cache, state, loop.logits, pace, drafts)

    def step(loop: _Loop) -> _Loop:
        loop, guesses = _guess(loop, options, sampling)
        num_guesses = jnp.sum(guesses.counts, dtype=jnp.int32)
        num_running = loop.state.places.num_running
        is_worth_it = loop.pace.pays(num_guesses, num_running, options.cost)
        loop = when(is_worth_it, checking, loop, *guesses)
        loop = when(~is_worth_it, plain, loop)
        cache, state = settle_places(loop.cache, loop.state)
        return loop._replace(cache=cache, state=state)

    drafts = begin_drafts(options, state) if isinstance(options, DraftModel) else None
    logits = jnp.zeros(state.seen.shape, jnp.float32)
    loop = while_loop(
        lambda loop: jnp.any(loop.state.is_running),
        step,
        _Loop(cache, state, logits, Pace.begin(), drafts),
    )
    return loop.cache, loop.state


def _choose_sampler(
    drafts: Drafts | None, guesses: Guesses
) -> Callable[[jax.Array], Sampler]:
    """Return how tokens are chosen after i guesses, i32[].

    A guess that is looked up is no draw: to draw a token and to see whether it is the
    guess accepts it as often as it should be.
    """
    if drafts is None:
        return lambda _: sample
    logits = drafts.logits
    return lambda i: make_rejection_sampler(guesses, logits, i)


def _guess(
    loop: _Loop, options: Speculation, sampling: Sampling
) -> tuple[_Loop, Guesses]:
    """Guess for all places, unless it is not the time for it."""
    cache, state = loop.cache, loop.state
    places, loads = state.places, state.loads(cache)
    is_ready = places.is_cached & places.is_running
    lengths = state.result.lengths[places.sequences]
    # A first token is drawn for all samples of a prompt, by a plain step.
    is_decoding = jnp.all((loads.count_left(places) <= 1) & (~is_ready | (lengths > 0)))
    Carry = tuple[Guesses, Drafts | None]

    def guess(carry: Carry) -> Carry:
        drafts = carry[1]
        if isinstance(options, DraftModel):
            assert drafts is not None
            drafts = draft(
                options, drafts, state, loads.text_lengths, is_ready, sampling
            )
            tokens, counts = drafts.guesses
        else:
            texts, lengths = find_texts(state.prompts, state.result, places.sequences)
            tokens, counts = find_guesses(texts, lengths, options)
        return Guesses(tokens, limit_guesses(cache, state, loads, counts)), drafts

    guesses, drafts = when(
        is_decoding & (loop.pace.wait == 0),
        guess,
        (Guesses.none(places.num_places, options.num_tokens), loop.drafts),
    )
    return loop._replace(drafts=drafts), guesses
