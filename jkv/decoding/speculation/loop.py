"""The loop of speculative decoding: plain steps and steps that verify draft tokens.

A step verifies draft tokens only if every cached sequence lacks just its newest token.
Prompts and preempted sequences are computed by plain steps.

Symbols: W places, V vocabulary size.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.model.runner import Runner
from jkv.decoding.sampling.draws import Choice
from jkv.decoding.scheduler.state import GenerationState
from jkv.decoding.scheduler.step import advance, schedule
from jkv.decoding.speculation.draft_tokens import (
    DraftTokens,
    find_draft_tokens,
    force_draft_tokens,
    limit_draft_tokens,
)
from jkv.decoding.speculation.drafting import (
    DraftRows,
    Drafts,
    draft,
    keep_accepted,
    open_rows,
)
from jkv.decoding.speculation.options import DraftModel, PromptLookup, check_speculation
from jkv.decoding.speculation.pace import Pace
from jkv.decoding.speculation.verification import verify_draft_tokens
from jkv.decoding.texts.prompts import find_texts
from jkv.indexing import gather
from jkv.sharding.loops import when, while_loop
from jkv.state import NO_SEQUENCE, Cache
from jkv.status import UsageError

Speculation = PromptLookup | DraftModel


class SpeculationState(NamedTuple):
    """Acceptance rates, and the rows of a draft model."""

    pace: Pace
    rows: DraftRows | None  # of a draft model

    @property
    def draft_cache(self) -> Cache | None:
        """The cache of a draft model, or None."""
        return self.rows and self.rows.cache

    def forget(self, sequences: jax.Array) -> "SpeculationState":
        """Forget sequences, i32[K], that are replaced by new ones."""

        def keep(texts: jax.Array) -> jax.Array:
            passes = jnp.any(texts[:, None] == sequences[None], axis=1)
            return jnp.where(passes, NO_SEQUENCE, texts)

        rows = self.rows
        return SpeculationState(
            pace=self.pace._replace(texts=keep(self.pace.texts)),
            rows=rows and rows._replace(owners=keep(rows.owners)),
        )


class _Loop(NamedTuple):
    """Carry of the loop."""

    cache: Cache
    state: GenerationState  # without `speculation`
    logits: jax.Array  # f32[W, V], buffer for the logits of plain steps
    pace: Pace
    drafts: Drafts | None  # of a draft model


class _Fixed(NamedTuple):
    """Constants of the loop."""

    runner: Runner
    choice: Choice
    options: Speculation


def begin_speculation(
    state: GenerationState, options: Speculation | None
) -> GenerationState:
    """Return a new generation with its speculation state."""
    if options is None:
        return state
    check_speculation(options)
    if state.exact is not None:
        raise UsageError(
            "speculate is not supported with exact=, which needs steps of one "
            "shape; omit speculate"
        )
    rows = open_rows(options, state) if isinstance(options, DraftModel) else None
    pace = Pace.begin(state.places.num_places, options.num_tokens, options.cost)
    return dataclasses.replace(state, speculation=SpeculationState(pace, rows))


def run_steps(
    runner: Runner,
    cache: Cache,
    state: GenerationState,  # of `begin_speculation` with the same kind of options
    choice: Choice,  # of N sequences
    # given the state and the number of steps so far
    goes_on: Callable[[GenerationState, jax.Array], jax.Array],
    options: Speculation | None = None,  # None runs plain steps
) -> tuple[Cache, GenerationState]:
    """Run steps while `goes_on(state, steps so far)` is True."""
    exact = state.exact
    if exact is not None:
        runner = runner._replace(exact=exact)
        choice = choice._replace(num_rows=exact.num_requests)
    logits = jnp.zeros(state.seen.shape, jnp.float32)
    if options is None:

        def take(loop: tuple[Cache, GenerationState, jax.Array]) -> Any:
            cache, state, logits = loop
            cache, state, logits = advance(runner, cache, state, choice, logits)
            return *schedule(cache, state), logits

        cache, state, _ = _repeat(goes_on, take, (cache, state, logits))
        return cache, state
    pace, drafts = _resume(state, options)
    _check_pending("cache", cache, options.num_tokens)
    if drafts is not None:
        _check_pending("draft model's cache", drafts.rows.cache, options.num_tokens - 1)
    state = dataclasses.replace(state, speculation=None)
    step = functools.partial(_step, _Fixed(runner, choice, options))
    loop = _repeat(goes_on, step, _Loop(cache, state, logits, pace, drafts))
    left = SpeculationState(loop.pace, loop.drafts and loop.drafts.rows)
    return loop.cache, dataclasses.replace(loop.state, speculation=left)


def _repeat(
    goes_on: Callable[[GenerationState, jax.Array], jax.Array],
    step: Callable[[Any], Any],
    loop: Any,
) -> Any:
    """Run steps on a tuple that starts with the cache and the state."""
    return while_loop(
        lambda carry: goes_on(carry[1][1], carry[0]),
        lambda carry: (carry[0] + 1, step(carry[1])),
        (jnp.zeros((), jnp.int32), loop),
    )[1]


def _check_pending(name: str, cache: Cache, num_tokens: int) -> None:
    """Refuse a cache with too few pending tokens in its recurrent states."""
    most = cache.metadata.max_pending
    if cache.metadata.has_states and most < num_tokens:
        raise UsageError(
            f"max_pending of the {name} must be at least {num_tokens}, to roll back "
            f"rejected draft tokens from recurrent states, got {most}; "
            f"pass jkv.StateConfig max_pending={num_tokens} "
            f"and the inputs of a token, or reduce num_tokens"
        )


def _resume(state: GenerationState, options: Speculation) -> tuple[Pace, Drafts | None]:
    """Return the pace and the draft rows of the last window."""
    old, drafts = state.speculation, isinstance(options, DraftModel)
    if not isinstance(old, SpeculationState) or drafts != (old.rows is not None):
        raise UsageError(
            f"speculate is a {type(options).__name__}, but this generation was "
            f"started without one; pass it to `begin` or `prefill`, too"
        )
    if old.rows is None:
        return old.pace, None
    vocabulary = state.seen.shape[1]
    return old.pace, Drafts.none(old.rows, options.num_tokens, vocabulary)


def _step(fixed: _Fixed, loop: _Loop) -> _Loop:
    """Run a plain or a speculative step."""
    loop = loop._replace(pace=loop.pace.follow(loop.state.places.sequences))
    loop, drafted = _draft(fixed, loop)
    is_worth_it = jnp.any(drafted.counts > 0)
    given = jax.tree.leaves(drafted)
    loop = when(is_worth_it, functools.partial(_check, fixed), loop, *given)
    loop = when(~is_worth_it, functools.partial(_advance, fixed), loop)
    cache, state = schedule(loop.cache, loop.state)
    return loop._replace(cache=cache, state=state)


def _advance(fixed: _Fixed, loop: _Loop) -> _Loop:
    """Run a plain step."""
    cache, state, logits = advance(
        fixed.runner, loop.cache, loop.state, fixed.choice, loop.logits
    )
    pace = loop.pace.after_step()
    return loop._replace(cache=cache, state=state, logits=logits, pace=pace)


def _check(fixed: _Fixed, loop: _Loop, *given: jax.Array) -> _Loop:
    """Run a step that verifies draft tokens."""
    drafted, drafts = DraftTokens(*given), loop.drafts
    before = loop.state.active(loop.cache).text_lengths
    running = loop.state.places.num_running
    logits = drafts and drafts.logits
    cache, state, accepted = verify_draft_tokens(
        fixed.runner, loop.cache, loop.state, fixed.choice, drafted, logits
    )
    if drafts is not None:
        drafts = keep_accepted(drafts, before, accepted)
    pace = loop.pace.after_verification(drafted, accepted, running, fixed.options.cost)
    return _Loop(cache, state, loop.logits, pace, drafts)


def _draft(fixed: _Fixed, loop: _Loop) -> tuple[_Loop, DraftTokens]:
    """Return draft tokens for the sequences where they pay, or none."""
    cache, state, options = loop.cache, loop.state, fixed.options
    places, active = state.places, state.active(cache)
    is_ready = places.is_cached & places.is_running
    lengths = gather(state.result.lengths, places.sequences)
    # First tokens are chosen for all samples of a prompt, by a plain step.
    is_decoding = jnp.all(
        (active.count_left(places) <= 1) & (~is_ready | (lengths > 0))
    )
    processor = state.rows_of(fixed.choice.logits_processor)
    none = DraftTokens.none(places.num_places, options.num_tokens)
    forced = force_draft_tokens(processor, none)
    Carry = tuple[DraftTokens, Drafts | None]

    def choose(drafted: DraftTokens) -> jax.Array:
        return loop.pace.choose(drafted, places.num_running, options.cost)

    def propose(carry: Carry) -> Carry:
        drafts = carry[1]
        if isinstance(options, DraftModel):
            assert drafts is not None
            drafts = draft(
                options, drafts, state, active.text_lengths, is_ready, fixed.choice
            )
            drafted = drafts.drafted._replace(certain=forced.certain)
        else:
            texts, lengths = find_texts(state.prompts, state.result, places.sequences)
            drafted = find_draft_tokens(texts, lengths, options)
            drafted = force_draft_tokens(processor, drafted)
        drafted = drafted.limit(
            limit_draft_tokens(cache, state, active, drafted.counts)
        )
        drafted = drafted.limit(jnp.where(choose(drafted), drafted.counts, 0))
        if drafts is not None:
            # Unverified draft tokens may be wrong and would stay in the cache.
            drafts = keep_accepted(drafts, active.text_lengths, drafted.counts)
        return drafted, drafts

    # Drafting takes time, too: skip it if even the most draft tokens would not pay.
    most = jnp.where(is_ready, jnp.int32(options.num_tokens), 0)
    drafted, drafts = when(
        is_decoding & jnp.any(choose(forced.limit(most))),
        propose,
        (forced.limit(none.counts), loop.drafts),
    )
    return loop._replace(drafts=drafts), drafted
