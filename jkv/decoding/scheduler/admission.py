"""Arrival and admission of sequences.

`add_prompts` adds prompts to a generation between two windows of steps. `admit` opens
cache rows for sequences that have running places: a sequence that computes its prompt
allocates a row; one that shares it forks.

Symbols: N sequences, Q prompts, W places, K lanes or prompts of a call, P most prompt
tokens.
"""

import dataclasses
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.decoding.sampling.next_token import (
    as_logits_processor,
    begin_rows,
    check_processor_presence,
    find_first,
    judge_prompts,
    with_variants,
)
from jkv.decoding.scheduler.queue import (
    Attempt,
    drop_from_queue,
    find_pending,
    has_more_samples,
    list_queue,
    may_seat,
    order_queue,
    seat_waiting,
)
from jkv.decoding.scheduler.state import (
    LANES,
    ActiveSequences,
    GenerationState,
    RetainedPrompt,
    find_oldest,
    note_sequences,
)
from jkv.decoding.sequences.blocks import Blocks
from jkv.decoding.sequences.prompts import PromptFields, Prompts, find_sequences
from jkv.decoding.sequences.results import FinishReason, Generation
from jkv.decoding.sequences.spans import match_spans
from jkv.logits_processors import LogitsProcessor
from jkv.metadata import ring
from jkv.metadata.requests import IntegerRows, Integers, broadcast
from jkv.operations import gather, is_first, scatter, while_loop
from jkv.state import NO_SEQUENCE, Cache, Ring
from jkv.state.entry import takes_cache
from jkv.status import Status, UsageError
from jkv.verbs.allocation import allocate
from jkv.verbs.branching import fork


@takes_cache()
def add_prompts(
    cache: Cache,
    state: GenerationState,
    indices: Integers,
    prompts: IntegerRows | Prompts,
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
        Spans need spans in the first call, with its `max_span` and `cacheable_spans`;
        `extra_ids` are those of the first call.
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
      >>> cache = jkv.init(jkv.CacheConfig.toy())
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
    added = dataclasses.replace(added, extra_ids=state.prompts.extra_ids)
    if state.prompts.spans is not None or added.spans is not None:
        spans = match_spans(state.prompts.spans, added.spans, added.tokens)
        added = dataclasses.replace(added, spans=spans)
    is_busy = jnp.any(state.is_running.reshape(num_prompts, -1), axis=1)
    index = jnp.where(indices < 0, num_prompts, indices)
    is_free = ~gather(is_busy, index, fill=True)
    is_free &= is_first(index, num_prompts)
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


def admit(
    cache: Cache, state: GenerationState, slack: Blocks
) -> tuple[Cache, GenerationState]:
    """Admit waiting sequences, in order, as long as they fit."""
    num_lanes = min(LANES, state.places.num_places)
    Carry = tuple[Cache, GenerationState, jax.Array]

    def trip(carry: Carry) -> Carry:
        cache, state, _ = carry
        state, attempt = seat_waiting(cache, state, num_lanes)
        return _open_seated(cache, state, attempt, num_lanes)

    begins = may_seat(state, slack) | jnp.any(state.places.is_pending)
    cache, state, _ = while_loop(lambda carry: carry[2], trip, (cache, state, begins))
    return cache, state


class Lanes(NamedTuple):
    """At most K places to open in the cache, oldest first."""

    places: jax.Array  # i32[K], padded with W
    sequences: jax.Array  # i32[K]
    prompts: jax.Array  # i32[K]
    leads: jax.Array  # bool[K], computes its prompt
    forks: jax.Array  # bool[K], shares its prompt


def _open_seated(
    cache: Cache, state: GenerationState, attempt: Attempt, num_lanes: int
) -> tuple[Cache, GenerationState, jax.Array]:
    """Open rows for at most K seated sequences; return also bool[], more may follow."""
    active = state.active(cache)
    has_states = cache.metadata.has_states
    lanes, is_more = _find_lanes(state, active, num_lanes, has_states)
    sequences, lengths = find_sequences(state.prompts, state.result, lanes.sequences)
    if state.prompts.spans is not None:
        sequences = state.prompts.spans.cut_before(sequences, lanes.prompts)
    salts = gather(state.prompts.salts, lanes.prompts)
    if state.shortening is not None:
        prompt_lengths = gather(state.prompts.lengths, lanes.prompts)
        lengths = state.shortening.peak(prompt_lengths, lengths)
        sequences = state.shortening.findable(sequences, prompt_lengths)
    divergence = cache.metadata.index.find_divergence(cache.metadata, sequences, salts)
    if state.kept is not None:
        lengths = state.kept.skip(lanes, lengths)
    cache, opened = allocate(
        cache,
        jnp.where(lanes.leads, lengths, NO_SEQUENCE),
        tokens=sequences,
        salts=salts,
        keep_free=attempt.keep_free,
        recompute_last=state.recomputes_last,
    )
    if state.kept is not None:
        state, opened = state.kept.seat(cache, state, lanes, opened)
    seq_ids, retained = opened.seq_ids, state.retained
    if state.num_samples > 1:
        cache, forked, retained = _fork_prompts(cache, state, active, lanes)
        seq_ids = jnp.where(lanes.leads, seq_ids, forked)
    state = _give_up(state, attempt, lanes, opened.status, seq_ids)
    state = dataclasses.replace(state, retained=retained)
    state = _note_opened(state, lanes, seq_ids, opened.num_cached, divergence)
    return cache, state, attempt.goes_on | (is_more & jnp.any(seq_ids >= 0))


def _find_lanes(
    state: GenerationState, active: ActiveSequences, num_lanes: int, has_states: bool
) -> tuple[Lanes, jax.Array]:
    """Return the places to open, and bool[], True if there are more than K."""
    places = state.places
    leads = places.is_pending
    forks = jnp.zeros_like(leads)
    if state.num_samples > 1:
        leads, forks = find_pending(state, active, has_states)
    can_open = leads | forks
    lanes = find_oldest(places, can_open, num_lanes)
    found = Lanes(
        places=lanes,
        sequences=gather(places.sequences, lanes),
        prompts=gather(active.prompts, lanes),
        leads=gather(leads, lanes, fill=False),
        forks=gather(forks, lanes, fill=False),
    )
    return found, jnp.sum(can_open, dtype=jnp.int32) > num_lanes


def _fork_prompts(
    cache: Cache, state: GenerationState, active: ActiveSequences, lanes: Lanes
) -> tuple[Cache, jax.Array, RetainedPrompt]:
    """Fork prompts from sequences that have them; the last fork takes the held row.

    Returns:
      The cache; i32[K], the rows of the forks, -1 if refused; and the retained prompt.
    """
    places, retained = state.places, state.retained
    has_prompt, may_take = active.has_prompt, jnp.bool_(True)
    if cache.metadata.has_states:
        # A state cannot be truncated: the prompt stays held while samples wait for it.
        has_prompt = active.done == active.prompt_lengths
        may_take = ~gather(has_more_samples(state, active), lanes.prompts)
    is_source = (
        (places.is_cached & has_prompt)[None]
        & (active.prompts[None] == lanes.prompts[:, None])
        & lanes.forks[:, None]
    )
    has_source = jnp.any(is_source, axis=1)
    source = gather(places.seq_ids, jnp.argmax(is_source, axis=1))
    is_held = lanes.forks & ~has_source & retained.holds(lanes.prompts)
    takes = is_held & may_take & (jnp.cumsum(is_held, dtype=jnp.int32) == 1)
    parents = jnp.where(is_held & ~takes, retained.seq_id, NO_SEQUENCE)
    parents = jnp.where(has_source, source, parents)
    prompt_lengths = gather(state.prompts.lengths, lanes.prompts)
    if state.shortening is not None:
        prompt_lengths = state.shortening.shared(prompt_lengths)
    cache, forked = fork(cache, parents, prompt_lengths)
    seq_ids = jnp.where(takes, retained.seq_id, forked.seq_ids)
    left = jnp.where(jnp.any(takes), NO_SEQUENCE, retained.seq_id)
    return cache, seq_ids, retained._replace(seq_id=left)


def _note_opened(
    state: GenerationState,
    lanes: Lanes,
    seq_ids: jax.Array,
    num_cached: jax.Array,
    divergence: jax.Array | None,
) -> GenerationState:
    """Record the cache rows given to places, i32[K], -1 for none."""
    place = jnp.where(seq_ids >= 0, lanes.places, state.places.num_places)
    if divergence is not None and state.divergence is not None:
        noted = scatter(state.divergence, place, divergence)
        state = dataclasses.replace(state, divergence=noted)
    result = state.result.add_counts(cached_tokens=jnp.sum(num_cached, dtype=jnp.int32))
    # Count prompt tokens only: a preempted sequence finds generated tokens cached too.
    begins = (seq_ids >= 0) & (gather(result.lengths, lanes.sequences) == 0)
    begun = jnp.where(begins, lanes.sequences, result.lengths.shape[0])
    state = dataclasses.replace(
        state,
        places=state.places._replace(
            seq_ids=scatter(state.places.seq_ids, place, seq_ids)
        ),
        result=result._replace(
            cached_tokens=scatter(result.cached_tokens, begun, num_cached)
        ),
    )
    return note_sequences(state, place)


def _give_up(
    state: GenerationState,  # before the rows were opened
    attempt: Attempt,  # conditions of the admission
    lanes: Lanes,
    status: jax.Array,  # i32[K], status of the leaders' allocation
    seq_ids: jax.Array,  # i32[K], the opened rows
) -> GenerationState:
    """Unseat a failed trial; finish a sequence that cannot start even alone."""
    places, result = state.places, state.result
    is_alone = ~jnp.any(places.is_cached) & ~jnp.any(seq_ids >= 0)
    refused = lanes.leads & (status != Status.OK)
    ages = gather(places.ages, lanes.places, fill=-1)
    is_tried = attempt.is_trial & (ages == places.num_running - 1)
    unseats = jnp.any(is_tried & refused) & ~is_alone
    reason = find_first(
        (),
        [
            (FinishReason.OUT_OF_SEQUENCES, status[0] == Status.OUT_OF_SEQUENCES),
            (FinishReason.OUT_OF_BLOCKS, status[0] == Status.OUT_OF_BLOCKS),
        ],
    )
    num_sequences = result.reasons.shape[0]
    ended = jnp.where(refused[0] & is_alone, lanes.sequences[0], num_sequences)
    return dataclasses.replace(
        state,
        places=places._replace(
            num_running=places.num_running - unseats.astype(jnp.int32)
        ),
        seating_needs=tuple(
            jnp.where(unseats, slack + 1, needs)
            for slack, needs in zip(attempt.slack, state.seating_needs, strict=True)
        ),
        result=result._replace(reasons=scatter(result.reasons, ended, reason)),
    )
