"""One step: a token or a piece of a prompt of each running sequence, then what is next.

A step gives a row to every sequence in the cache, computes the rows, chooses a token
for each text whose last token was among them, and leaves the places as the next step
finds them: ended sequences released, the youngest preempted where blocks lack, those
that wait admitted.

Symbols: N sequences, W places, R rows of a step, V tokens in the vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.model.runner import (
    Runner,
    choose_size,
    end_at_snapshots,
    locate_rows,
    share_rows,
)
from jkv.decoding.sampling.draws import Choice
from jkv.decoding.sampling.next_token import Progress, choose_next
from jkv.decoding.scheduler.admission import admit
from jkv.decoding.scheduler.queue import hold_prompt
from jkv.decoding.scheduler.release import (
    leave_ended,
    preempt_youngest,
    release_ended,
)
from jkv.decoding.scheduler.state import GenerationState, Loads
from jkv.decoding.texts.blocks import count_used_blocks
from jkv.decoding.texts.results import FinishReason, Generation
from jkv.indexing import gather, scatter
from jkv.sharding.loops import when, while_loop
from jkv.state import NO_SEQUENCE, Cache
from jkv.status import Status
from jkv.verbs.attention_plan import plan_attention
from jkv.verbs.commitment import commit


class Computed(NamedTuple):
    """What the rows of a step brought, for each place."""

    logits: jax.Array  # f32[W, V], after the place's last row, any without one
    status: jax.Array  # i32[W], what the cache answered
    num_rows: jax.Array  # i32[W], rows computed


def advance(
    runner: Runner,
    cache: Cache,
    state: GenerationState,
    choice: Choice,  # of N sequences
    logits: jax.Array,  # f32[W, V], the last step's, whose memory is used again
) -> tuple[Cache, GenerationState, jax.Array]:
    """Compute the rows of a step, and choose a token for each text that is whole."""
    loads, places = state.loads(cache), state.places
    left = loads.count_left(places)
    counts = when(
        jnp.any(left > 1),
        lambda left: share_rows(left, places.ages, state.row_counts[-1]),
        left,
    )
    counts = end_at_snapshots(cache, loads.done, counts, left, state.partings)
    cache, computed = _compute_rows(runner, cache, state, loads, counts, logits)
    state = count_step(cache, state, loads, computed.num_rows)
    state = note_refusals(state, computed.status)
    is_whole = loads.done + computed.num_rows == loads.text_lengths
    is_ready = (computed.num_rows > 0) & is_whole
    return cache, *choose_tokens(cache, state, computed.logits, is_ready, choice)


def schedule(cache: Cache, state: GenerationState) -> tuple[Cache, GenerationState]:
    """Decide what the next step runs: release, preempt, admit.

    Sequences that were open before have places, and keep their blocks.
    """
    if state.before is not None:
        return cache, leave_ended(state)
    cache, state = release_ended(cache, state)
    cache, state, slack = preempt_youngest(cache, state)
    cache, state = hold_prompt(cache, state)
    return admit(cache, state, slack)


def _compute_rows(
    runner: Runner,
    cache: Cache,
    state: GenerationState,
    loads: Loads,
    counts: jax.Array,  # i32[W]
    logits: jax.Array,  # f32[W, V], memory for the new ones
) -> tuple[Cache, Computed]:
    """Compute rows of the texts, i32[W], in the smallest step that holds them."""
    places, num_places = state.places, counts.shape[0]
    sizes, work = state.row_counts, jnp.sum(counts, dtype=jnp.int32)
    size, may_decode = choose_size(work, sizes), num_places in sizes
    may_decode &= runner.exact is None
    # Where each sequence has one row at most, row i is that of place i: a place without
    # one owns a row of padding.
    is_decoding = jnp.asarray(may_decode) & jnp.all(counts <= 1)
    if may_decode:
        is_decoding &= size == sizes.index(num_places)
    rows = jnp.where(is_decoding, 1, counts)
    seq_ids = jnp.where(counts > 0, places.seq_ids, NO_SEQUENCE)
    tokens = state.tokens_at(*locate_rows(rows, loads.done, sizes[-1]))

    # The step is planned once, for the most rows; the model computes the first of them,
    # as many as the smallest size that holds the work. Each size has a plan of its own.
    cache, batch, tokens = runner.append(cache, seq_ids, tokens, rows)
    batch = dataclasses.replace(batch, plan=None)
    leaves, structure = jax.tree.flatten((tokens, batch))
    Carry = tuple[Cache, jax.Array]

    def program(num_rows: int, *, decodes: bool) -> Callable[..., Carry]:
        def compute(carry: Carry, *leaves: jax.Array) -> Carry:
            tokens, batch = jax.tree.unflatten(structure, leaves)
            first = dataclasses.replace(batch.first_rows(num_rows), is_decoding=decodes)
            first = plan_attention(carry[0], first)
            cache, logits = runner.compute(carry[0], first, tokens[:num_rows])
            return cache, logits[:num_places]

        return compute

    # Each program on its own: `lax.switch` would copy the pool.
    carry = cache, logits
    if may_decode:
        decode = program(num_places, decodes=True)
        carry = when(is_decoding & (work > 0), decode, carry, *leaves)
    for i, num_rows in enumerate(sizes):
        if num_rows == num_places == 1 and may_decode:
            continue  # its work is one row each
        is_chosen = (size == i) & ~is_decoding & (work > 0)
        num_rows = num_rows if runner.exact is None else tokens.shape[0]
        carry = when(is_chosen, program(num_rows, decodes=False), carry, *leaves)
    cache, logits = carry
    cache, batch = commit(cache, batch), batch.first_requests(num_places)
    return cache, Computed(logits, batch.status, batch.query_lengths)


def choose_tokens(
    cache: Cache,
    state: GenerationState,
    logits: jax.Array,  # f32[W, V], after the last token of each place's text
    is_ready: jax.Array,  # bool[W], whether they are
    choice: Choice,  # of N sequences
) -> tuple[GenerationState, jax.Array]:  # f32[W, V], those of `choose_next`
    """Choose the next token of each text that is in the cache whole."""
    places, lengths = state.places, state.result.lengths
    sequences = jnp.where(is_ready, places.sequences, lengths.shape[0])
    progress = state.progress(cache)
    result, tokens, steered = choose_next(
        progress, logits, sequences, state.seen, choice
    )
    if state.num_samples > 1:
        is_first = is_ready & (gather(lengths, places.sequences) == 0)
        progress = progress._replace(result=result)
        result = _choose_for_samples(progress, state, logits, is_first, choice)
    state = dataclasses.replace(state, result=result)
    return note_seen(state, is_ready, tokens), steered


def note_seen(
    state: GenerationState, is_ready: jax.Array, tokens: jax.Array
) -> GenerationState:
    """Note that texts have these tokens now, i32[W] or i32[W, C], where bool[...]."""
    place = jnp.arange(state.places.num_places, dtype=jnp.int32)
    place = place.reshape(-1, *(1,) * (tokens.ndim - 1))
    token = jnp.where(is_ready, tokens, state.seen.shape[1])
    seen = scatter(state.seen, (place, token), True)
    return dataclasses.replace(state, seen=seen)


def _choose_for_samples(
    progress: Progress,
    state: GenerationState,
    logits: jax.Array,
    is_first: jax.Array,
    choice: Choice,
) -> Generation:
    """Choose the first tokens of all samples of prompts that are whole, bool[W].

    They are chosen at once, wherever those samples are, so that no logits are kept.
    """
    num_samples, num_sequences = state.num_samples, state.result.lengths.shape[0]
    Carry = tuple[jax.Array, Generation]

    def trip(carry: Carry) -> Carry:
        todo, result = carry
        place = jnp.argmax(todo)
        leader = gather(state.places.sequences, place)
        sample_index = jnp.arange(num_samples, dtype=jnp.int32)
        sequences = (
            jax.lax.div(leader, jnp.int32(num_samples)) * num_samples + sample_index
        )
        before = progress._replace(result=result)
        is_open = gather(before.is_running, sequences) & (
            gather(result.lengths, sequences) == 0
        )
        is_open &= sequences != leader
        chosen = jnp.where(is_open, sequences, num_sequences)

        def spread(row: jax.Array) -> jax.Array:
            return jnp.broadcast_to(row[None], (num_samples, row.shape[0]))

        rows, seen = spread(gather(logits, place)), spread(gather(state.seen, place))
        result, *_ = choose_next(before, rows, chosen, seen, choice)
        return todo.at[place].set(False), result

    carry = is_first, progress.result
    return while_loop(lambda carry: jnp.any(carry[0]), trip, carry)[1]


def note_refusals(
    state: GenerationState,
    status: jax.Array,  # i32[W], what the cache answered
) -> GenerationState:
    """End sequences that the caller freed, or whose last blocks it took."""
    result, places = state.result, state.places
    is_gone = status == Status.INVALID_SEQUENCE
    lacks_blocks = status == Status.OUT_OF_BLOCKS
    if state.before is None:
        # If others run, the youngest is preempted, and this one waits for its blocks.
        lacks_blocks &= (places.num_running == 1) & (state.holder.seq_id < 0)
    refused = is_gone | lacks_blocks
    cause = jnp.where(is_gone, FinishReason.CANCELLED, FinishReason.OUT_OF_BLOCKS)
    sequence = jnp.where(refused, places.sequences, result.reasons.shape[0])
    reasons = when(
        jnp.any(refused),
        lambda reasons: scatter(reasons, sequence, cause.astype(jnp.int32)),
        result.reasons,
    )
    return dataclasses.replace(state, result=result._replace(reasons=reasons))


def count_step(
    cache: Cache,
    state: GenerationState,
    loads: Loads,
    rows: jax.Array,  # i32[W], that it computed
) -> GenerationState:
    """Count a step that has appended and not yet freed."""
    places, old = state.places, state.result.statistics
    served = rows > 0
    of_prompt = jnp.clip(loads.prompt_lengths - loads.done, 0, rows)
    # Of the generated tokens only the newest of a text was never computed before.
    is_new = (loads.done + rows == loads.text_lengths) & (of_prompt < rows)
    again = rows - of_prompt - is_new.astype(jnp.int32)
    num_served = jnp.sum(served, dtype=jnp.int32)
    waits = (state.queue.count > 0) | (places.num_started > places.num_running)
    is_step = (num_served > 0).astype(jnp.int32)
    waits_now = waits.astype(jnp.int32) * is_step
    result = state.result.add_counts(
        num_steps=is_step,
        sequence_steps=num_served,
        prompt_tokens=jnp.sum(of_prompt, dtype=jnp.int32),
        recomputed_tokens=jnp.sum(again, dtype=jnp.int32),
        queue_steps=waits_now,
        idle_places=waits_now * (state.most_running - num_served),
    )
    used = count_used_blocks(cache)
    length = jnp.where(places.is_cached, loads.done + rows, 0)
    num_groups = len(cache.metadata.block_numbers)
    empty = num_groups * jnp.sum(-length % cache.block_size, dtype=jnp.int32)
    is_peak = (used > old.peak_blocks) & (num_served > 0)
    statistics = result.statistics._replace(
        peak_blocks=jnp.where(is_peak, used, old.peak_blocks),
        empty_slots=jnp.where(is_peak, empty, old.empty_slots),
    )
    return dataclasses.replace(state, result=result._replace(statistics=statistics))
