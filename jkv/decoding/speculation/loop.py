"""The loop of speculative decoding: plain steps and steps that verify draft tokens.

A step verifies draft tokens only if every cached sequence lacks just its newest token.
Prompts and preempted sequences are computed by plain steps. A drafter with layers of
its own drafts in the slots of the step, which are appended before, and is updated
behind every call of the model (`jkv.decoding.model.drafter`).

Symbols: W places, V vocabulary size.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.model.drafter import (
    Drafter,
    LayersOfGroups,
    SharedLayers,
    check_draft,
    check_drafter,
)
from jkv.decoding.model.runner import Runner
from jkv.decoding.sampling.draws import Choice
from jkv.decoding.scheduler.hidden import HiddenRows, can_recall, follow, without
from jkv.decoding.scheduler.state import ActiveSequences, GenerationState
from jkv.decoding.scheduler.step import advance, schedule
from jkv.decoding.speculation.draft_step import DraftStep
from jkv.decoding.speculation.draft_tokens import (
    DraftTokens,
    force_draft_tokens,
    limit_draft_tokens,
)
from jkv.decoding.speculation.pace import Pace
from jkv.decoding.speculation.verification import (
    Verification,
    append_rows,
    verify_draft_tokens,
)
from jkv.operations import gather, when, while_loop
from jkv.state import Batch, Cache
from jkv.status import UsageError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SpeculationState:
    """Acceptance rates, and the hidden states that a drafter needs."""

    pace: Pace
    hidden: HiddenRows | None  # None without auxiliary layers
    # The drafter's, which give the width of the hidden states; static.
    aux_layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    # The layers of the target, for steps without the drafter; static.
    target: LayersOfGroups = dataclasses.field(metadata={"static": True})

    def forget(self, sequences: jax.Array) -> "SpeculationState":
        """Forget sequences, i32[K], that are replaced by new ones."""
        known = without(self.pace.sequences, sequences)
        return dataclasses.replace(
            self,
            pace=self.pace._replace(sequences=known),
            hidden=self.hidden and self.hidden.forget(sequences),
        )


class _Loop(NamedTuple):
    """Carry of the loop."""

    cache: Cache
    state: GenerationState  # without `speculation`
    logits: jax.Array  # f32[W, V], buffer for the logits of plain steps
    pace: Pace
    hidden: HiddenRows | None


class _Fixed(NamedTuple):
    """Constants of the loop."""

    runner: Runner
    choice: Choice
    drafter: Drafter
    drafts: bool  # False for plain steps, which only update the drafter


def begin_speculation(
    runner: Runner, cache: Cache, state: GenerationState
) -> GenerationState:
    """Return a new generation with its speculation state, for the runner's drafter."""
    drafter = runner.drafter
    if drafter is None:
        return state
    check_drafter(drafter)
    if state.exact is not None:
        raise UsageError(
            "speculate is not supported with exact=, which needs steps of one "
            "shape; omit speculate"
        )
    layers = SharedLayers.of(cache, drafter)
    num_places, hidden = state.places.num_places, None
    if drafter.aux_layers:
        width = runner.count_hidden(cache, num_places)
        hidden = HiddenRows.empty(state, width)
        recalls = can_recall(cache, opens=state.before is None)
        state = dataclasses.replace(state, recomputes_last=recalls)
    pace = Pace.begin(num_places, drafter.num_tokens, drafter.cost)
    begun = SpeculationState(
        pace=pace,
        hidden=hidden,
        aux_layers=drafter.aux_layers,
        target=layers.target,
    )
    return dataclasses.replace(state, speculation=begun)


def run_steps(
    runner: Runner,
    cache: Cache,
    state: GenerationState,  # of `begin_speculation` with the same kind of drafter
    choice: Choice,  # of N sequences
    # given the state and the number of steps so far
    goes_on: Callable[[GenerationState, jax.Array], jax.Array],
    drafter: Drafter | None = None,  # None runs plain steps
    *,
    drafts: bool = True,  # False runs plain steps that update the drafter
) -> tuple[Cache, GenerationState]:
    """Run steps while `goes_on(state, steps so far)` is True."""
    exact = state.exact
    if exact is not None:
        runner = runner._replace(exact=exact)
        choice = choice._replace(num_rows=exact.num_requests)
    logits = jnp.zeros(state.seen.shape, jnp.float32)
    if drafter is None:

        def take(loop: tuple[Cache, GenerationState, jax.Array]) -> Any:
            cache, state, logits = loop
            if state.speculation is not None:
                given = runner, cache, state, choice, logits
                cache, state, logits = _advance_alone(*given)
            else:
                cache, state, logits, _ = advance(runner, cache, state, choice, logits)
            return *schedule(cache, state), logits

        speculation, whole = state.speculation, cache.layer_groups
        if speculation is not None:
            cache = cache.with_layers(speculation.target)
        cache, state, _ = _repeat(goes_on, take, (cache, state, logits))
        if speculation is not None:
            cache = cache.with_layers(whole)
        return cache, state
    speculation = _resume(state, drafter)
    SharedLayers.of(cache, drafter)
    _check_pending(cache, drafter.num_tokens)
    runner = runner._replace(drafter=drafter)
    state = dataclasses.replace(state, speculation=None)
    step = functools.partial(_step, _Fixed(runner, choice, drafter, drafts))
    given = speculation.pace, speculation.hidden
    loop = _repeat(goes_on, step, _Loop(cache, state, logits, *given))
    left = dataclasses.replace(speculation, pace=loop.pace, hidden=loop.hidden)
    return loop.cache, dataclasses.replace(loop.state, speculation=left)


def _advance_alone(
    runner: Runner,
    cache: Cache,
    state: GenerationState,
    choice: Choice,
    logits: jax.Array,
) -> tuple[Cache, GenerationState, jax.Array]:
    """Run a plain step without the drafter; its rows have unknown hidden states."""
    speculation = state.speculation
    hidden = speculation.hidden
    cache, state, logits, hidden = advance(runner, cache, state, choice, logits, hidden)
    if hidden is not None:
        left = dataclasses.replace(speculation, hidden=hidden)
        state = dataclasses.replace(state, speculation=left)
    return cache, state, logits


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


def _check_pending(cache: Cache, num_tokens: int) -> None:
    """Refuse a cache with too few pending tokens in its recurrent states."""
    most = cache.metadata.max_pending
    if cache.metadata.has_states and most < num_tokens:
        raise UsageError(
            f"max_pending of the cache must be at least {num_tokens}, to roll back "
            f"rejected draft tokens from recurrent states, got {most}; "
            f"pass jkv.StateConfig max_pending={num_tokens} "
            f"and the inputs of a token, or reduce num_tokens"
        )


def _resume(state: GenerationState, drafter: Drafter) -> SpeculationState:
    """Return the pace and the hidden states of the last window."""
    old = state.speculation
    if not isinstance(old, SpeculationState):
        raise UsageError(
            f"speculate is a {type(drafter).__name__}, but this generation was "
            f"started without one; pass it to `begin` or `prefill`, too"
        )
    if drafter.aux_layers != old.aux_layers:
        raise UsageError(
            f"aux_layers of speculate must be {old.aux_layers}, as when this "
            f"generation was started, got {drafter.aux_layers}; pass the same drafter "
            f"as to `begin` or `prefill`"
        )
    return old


def _step(fixed: _Fixed, loop: _Loop) -> _Loop:
    """Run a plain or a speculative step."""
    loop = loop._replace(pace=loop.pace.follow(loop.state.places.sequences))
    if fixed.drafts:
        start, forced = (loop, jnp.zeros((), bool)), _find_forced(fixed, loop.state)
        try_it = _may_draft(fixed, loop, forced)
        speculate = functools.partial(_speculate, fixed)
        loop, is_done = when(try_it, speculate, start, *forced)
        loop = when(~is_done, functools.partial(_advance, fixed), loop)
    else:
        loop = _advance(fixed, loop)
    cache, state = schedule(loop.cache, loop.state)
    return loop._replace(cache=cache, state=state)


def _advance(fixed: _Fixed, loop: _Loop) -> _Loop:
    """Run a plain step."""
    cache, state, logits, hidden = advance(
        fixed.runner, loop.cache, loop.state, fixed.choice, loop.logits, loop.hidden
    )
    return _Loop(cache, state, logits, loop.pace.after_step(), hidden)


def _may_draft(fixed: _Fixed, loop: _Loop, forced: DraftTokens) -> jax.Array:
    """Return True if a step may draft, bool[].

    Drafting takes time, too: skip it if even the most draft tokens would not pay.
    """
    state = loop.state
    places, active = state.places, state.active(loop.cache)
    is_ready = places.is_cached & places.is_running
    lengths = gather(state.result.lengths, places.sequences)
    # First tokens are chosen for all samples of a prompt, by a plain step.
    is_decoding = jnp.all(
        (active.count_left(places) <= 1) & (~is_ready | (lengths > 0))
    )
    most = forced.limit(_most(fixed, state))
    pays = loop.pace.choose(most, places.num_running, fixed.drafter.cost)
    return is_decoding & jnp.any(pays)


def _most(fixed: _Fixed, state: GenerationState) -> jax.Array:
    """Return the most draft tokens of each place, i32[W]."""
    is_ready = state.places.is_cached & state.places.is_running
    return jnp.where(is_ready, jnp.int32(fixed.drafter.num_tokens), 0)


def _find_forced(fixed: _Fixed, state: GenerationState) -> DraftTokens:
    """Return the draft tokens that a logits processor forces."""
    processor = state.rows_of(fixed.choice.logits_processor)
    none = DraftTokens.none(state.places.num_places, fixed.drafter.num_tokens)
    return force_draft_tokens(processor, none)


def _speculate(
    fixed: _Fixed, carry: tuple[_Loop, jax.Array], *leaves: jax.Array
) -> tuple[_Loop, jax.Array]:
    """Draft and verify where it pays; return also if a step was run, bool[].

    `leaves` are the fields of the `DraftTokens` forced by a logits processor.
    """
    (loop, _), forced = carry, DraftTokens(*leaves)
    cache, state = loop.cache, loop.state
    active, num_tokens = state.active(cache), fixed.drafter.num_tokens

    def choose(drafted: DraftTokens) -> DraftTokens:
        """Keep the draft tokens that fit and pay."""
        counts = limit_draft_tokens(cache, state, active, drafted.counts)
        drafted = drafted.limit(counts)
        running, cost = state.places.num_running, fixed.drafter.cost
        pays = loop.pace.choose(drafted, running, cost)
        return drafted.limit(jnp.where(pays, drafted.counts, 0))

    if fixed.drafter.groups:
        # The rows are appended before their tokens are drafted.
        wanted = choose(forced.limit(_most(fixed, state)))

        def run(loop: _Loop, counts: jax.Array, certain: jax.Array) -> _Loop:
            active = loop.state.active(loop.cache)
            cache, batch = append_rows(
                loop.cache, loop.state, active, counts, num_tokens
            )
            cache, drafted, logits = _draft(fixed, cache, loop, counts, certain, batch)
            loop = loop._replace(cache=cache)
            return _verify(fixed, loop, active, batch, drafted, logits)

        is_worth_it = jnp.any(wanted.counts > 0)
        given = wanted.counts, forced.certain
        return when(is_worth_it, run, loop, *given), is_worth_it

    most = _most(fixed, state)
    cache, drafted, logits = _draft(fixed, cache, loop, most, forced.certain, None)
    if logits is None:
        drafted = choose(drafted)
    else:  # the decision must not depend on the drawn tokens, nor on their number
        wanted = choose(forced.limit(most))
        drafted = drafted.limit(jnp.minimum(drafted.counts, wanted.counts))
    drawn, structure = jax.tree.flatten((drafted, logits))

    def check(loop: _Loop, *drawn: jax.Array) -> _Loop:
        drafted, logits = jax.tree.unflatten(structure, drawn)
        active = loop.state.active(loop.cache)
        cache, batch = append_rows(
            loop.cache, loop.state, active, drafted.counts, num_tokens, drafted.tokens
        )
        loop = loop._replace(cache=cache)
        return _verify(fixed, loop, active, batch, drafted, logits)

    is_worth_it = jnp.any(drafted.counts > 0)
    return when(is_worth_it, check, loop, *drawn), is_worth_it


def _draft(
    fixed: _Fixed,
    cache: Cache,  # with the step appended, if the drafter has groups
    loop: _Loop,  # before the step
    counts: jax.Array,  # i32[W], most draft tokens of each
    certain: jax.Array,  # i32[W], leading tokens that a logits processor forces
    batch: Batch | None,
) -> tuple[Cache, DraftTokens, jax.Array | None]:
    """Return the cache, draft tokens, and the logits they were drawn from, if any."""
    drafter, state = fixed.drafter, loop.state
    active = state.active(loop.cache)
    follower = follow(drafter, loop.hidden, state, active)
    previous = jnp.zeros((counts.shape[0], 0), jnp.float32)
    if follower is not None:
        previous = follower.previous
    if batch is not None:
        batch = dataclasses.replace(batch, is_draft=True)
    step = DraftStep(
        loop.cache,
        state,
        active,
        fixed.choice,
        counts,
        drafter.num_tokens,
        previous,
        batch,
    )
    answer = drafter.draft(cache, step)
    check_draft(drafter, answer)
    after, tokens, found = answer
    drafted, logits = step.finish(tokens, found)
    if logits is None:
        processor = state.rows_of(fixed.choice.logits_processor)
        drafted = force_draft_tokens(processor, drafted)
        drafted = drafted.limit(jnp.minimum(drafted.counts, counts))
    else:
        drafted = drafted._replace(certain=jnp.minimum(certain, drafted.counts))
    return _restore_states(cache, after, drafter), drafted, logits


def _restore_states(before: Cache, after: Cache, drafter: Drafter) -> Cache:
    """Return the cache with the drafter's recurrent states from before drafting.

    Keys of rejected tokens are overwritten or cut off; a state that has passed them
    could not be rolled back.
    """
    first = len(before.storage) - len(drafter.groups)
    for number in before.metadata.state_numbers:
        if number >= first:
            after = after.with_group_storage(number, before.storage[number])
    return after


def _verify(
    fixed: _Fixed,
    loop: _Loop,  # with the cache after the append
    active: ActiveSequences,  # before the step
    batch: Batch,
    drafted: DraftTokens,
    logits: jax.Array | None,
) -> _Loop:
    """Verify draft tokens, and update the drafter."""
    state, running = loop.state, loop.state.places.num_running
    verification = Verification(
        state, active, fixed.choice, drafted, logits, batch, loop.hidden
    )
    cache, state, accepted, hidden = verify_draft_tokens(
        fixed.runner, loop.cache, verification
    )
    cost = fixed.drafter.cost
    pace = loop.pace.after_verification(drafted, accepted, running, cost)
    return _Loop(cache, state, loop.logits, pace, hidden)
