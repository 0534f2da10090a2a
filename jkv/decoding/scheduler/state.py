"""State of a running generation: results, prompts, running places and queue.

A sequence gets a running place when it is seated and keeps it until it finishes. Age is
the order of seating. Preemption takes the youngest first, and preempted sequences are
seated again before new ones. Sorted by age, the places are therefore running, then
preempted, then empty; preempting or seating a sequence moves one border.

Symbols: N sequences, Q prompts, W places, V vocabulary size, K lanes.
"""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jkv.decoding.model.steps import Exact
from jkv.decoding.sampling.next_token import Bounds, ProcessorRows, Progress, rows_of
from jkv.decoding.scheduler.kept_rows import KeptRows
from jkv.decoding.sequences import blocks
from jkv.decoding.sequences.blocks import Blocks, BlockSize, Held
from jkv.decoding.sequences.prompts import Prompts, Stops, find_sequences, find_tokens
from jkv.decoding.sequences.results import FinishReason, Generation
from jkv.logits_processors import LogitsProcessor
from jkv.masks import SpanMask
from jkv.operations import gather, running_sum, scatter
from jkv.state import NO_SEQUENCE, Cache, Ring

# Most sequences opened or freed in one trip of a loop. A trip costs all of its
# lanes, and few sequences finish in a step.
LANES = 16


class Places(NamedTuple):
    """Running places, W of them, each for one sequence at a time."""

    sequences: jax.Array  # i32[W], the sequence of each place; arbitrary if empty
    seq_ids: jax.Array  # i32[W], cache row of each sequence, -1 for none
    ages: jax.Array  # i32[W], ages from 0, the oldest: a permutation
    num_running: jax.Array  # i32[], running sequences, the oldest ones
    num_started: jax.Array  # i32[], running and preempted sequences

    @classmethod
    def empty(cls, num_places: int) -> "Places":
        return cls(
            sequences=jnp.zeros((num_places,), jnp.int32),
            seq_ids=jnp.full((num_places,), NO_SEQUENCE, jnp.int32),
            ages=jnp.arange(num_places, dtype=jnp.int32),
            num_running=jnp.zeros((), jnp.int32),
            num_started=jnp.zeros((), jnp.int32),
        )

    @classmethod
    def of_open(cls, seq_ids: jax.Array, num_places: int) -> "Places":
        """Seat the open sequences in `seq_ids`, i32[N], N <= W; skip NO_SEQUENCE."""
        num_sequences = seq_ids.shape[0]
        more = (0, num_places - num_sequences)
        places = cls.empty(num_places)._replace(
            sequences=jnp.pad(jnp.arange(num_sequences, dtype=jnp.int32), more),
            seq_ids=jnp.pad(seq_ids, more, constant_values=NO_SEQUENCE),
            num_running=jnp.int32(num_sequences),
            num_started=jnp.int32(num_sequences),
        )
        return vacate(places, places.seq_ids == NO_SEQUENCE)

    @property
    def num_places(self) -> int:
        """The number of places, W."""
        return self.ages.shape[0]

    @property
    def is_running(self) -> jax.Array:
        """True where a sequence runs, bool[W]."""
        return self.ages < self.num_running

    @property
    def is_started(self) -> jax.Array:
        """True where a sequence runs or is preempted, bool[W]."""
        return self.ages < self.num_started

    @property
    def is_cached(self) -> jax.Array:
        """True where the sequence has a row in the cache, bool[W]."""
        return self.seq_ids >= 0

    @property
    def is_pending(self) -> jax.Array:
        """True where a running sequence has no row in the cache yet, bool[W]."""
        return self.is_running & ~self.is_cached


def sort_by_age(places: Places) -> jax.Array:
    """Return the places from oldest to youngest, i32[W]."""
    place = jnp.arange(places.num_places, dtype=jnp.int32)
    return jnp.zeros_like(place).at[places.ages].set(place)


def find_chosen(
    chosen: jax.Array,  # bool[P]
    num_lanes: int,  # K, static
) -> jax.Array:
    """Return the first K chosen indices, i32[K], padded with P."""
    size = chosen.shape[0]
    rank = running_sum(chosen.astype(jnp.int32)) - 1
    lane = jnp.where(chosen & (rank < num_lanes), rank, num_lanes)
    found = jnp.full((num_lanes,), size, jnp.int32)
    return scatter(found, lane, jnp.arange(size, dtype=jnp.int32))


def find_oldest(
    places: Places,
    chosen: jax.Array,  # bool[W]
    num_lanes: int,  # K, static
) -> jax.Array:
    """Return the K oldest chosen places, i32[K], padded with W."""
    chosen_by_age = jnp.zeros_like(chosen).at[places.ages].set(chosen)
    age = find_chosen(chosen_by_age, num_lanes)
    by_age = sort_by_age(places)
    return gather(by_age, age, fill=places.num_places)


def find_youngest_running(places: Places) -> jax.Array:
    """Return the running place to preempt next, i32[]; W if none runs."""
    is_youngest = places.ages == places.num_running - 1
    youngest = jnp.argmax(is_youngest).astype(jnp.int32)
    return jnp.where(places.num_running > 0, youngest, places.num_places)


def vacate(places: Places, ended: jax.Array) -> Places:
    """Empty the places of finished sequences, bool[W]; keep the order of the others."""
    ended = ended & places.is_started
    ended_by_age = jnp.zeros_like(ended).at[places.ages].set(ended).astype(jnp.int32)
    upto = running_sum(ended_by_age)
    older = gather(upto - ended_by_age, places.ages)
    num_ended = upto[-1]
    num_started = places.num_started - num_ended
    # Empty places come last by age, newly emptied ones first among them.
    moved = jnp.where(ended, num_started + older, places.ages - older)
    num_stopped = jnp.sum(ended & places.is_running, dtype=jnp.int32)
    return places._replace(
        seq_ids=jnp.where(ended, NO_SEQUENCE, places.seq_ids),
        ages=jnp.where(places.is_started, moved, places.ages),
        num_running=places.num_running - num_stopped,
        num_started=num_started,
    )


class RetainedPrompt(NamedTuple):
    """A prompt kept in the cache for samples that have no running place."""

    seq_id: jax.Array  # i32[], its cache row, -1 for none
    prompt: jax.Array  # i32[], index of the prompt, arbitrary without a row

    @classmethod
    def none(cls) -> "RetainedPrompt":
        return cls(seq_id=jnp.full((), NO_SEQUENCE, jnp.int32), prompt=jnp.int32(0))

    def holds(self, prompts: jax.Array) -> jax.Array:
        """Return True for each prompt, i32[K], that is held; bool[K]."""
        return (self.seq_id >= 0) & (prompts == self.prompt)


class ActiveSequences(NamedTuple):
    """Prompt, lengths and blocks of the sequence in each of W places.

    Entries of empty places are arbitrary.
    """

    prompts: jax.Array  # i32[W], its prompt
    prompt_lengths: jax.Array  # i32[W], tokens of the prompt
    sequence_lengths: jax.Array  # i32[W], prompt and generated tokens
    done: jax.Array  # i32[W], computed tokens, 0 without a row
    slots: jax.Array  # i32[W], cached ones: all of them unless some were dropped
    held: Held  # blocks held by the sequence, i32[W]

    def count_left(self, places: Places) -> jax.Array:
        """Return the tokens still to compute, i32[W]; 0 for sequences without a row."""
        return jnp.where(places.is_cached, self.sequence_lengths - self.done, 0)

    @property
    def slots_at_end(self) -> jax.Array:
        """Slots of each sequence with all of its tokens, i32[W]."""
        if self.slots is self.done:
            return self.sequence_lengths
        return self.sequence_lengths - (self.done - self.slots)

    @property
    def has_prompt(self) -> jax.Array:
        """True where the whole prompt is in the cache, bool[W]."""
        return self.done >= self.prompt_lengths


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GenerationState:
    """A generation in progress: returned by `prefill`, advanced by `decode`.

    The last token of each running sequence is chosen but not yet in the cache.
    """

    result: Generation  # results so far
    prompts: Prompts  # prompts and their limits
    stops: Stops  # stop conditions
    places: Places  # running places
    queue: Ring  # i32[N], sequences that never ran, in order
    retained: RetainedPrompt  # prompt kept for samples without a place
    seen: jax.Array  # bool[W, V], tokens that occur in each sequence
    num_blocks: Blocks  # i32[], blocks available to a sequence that runs alone
    most_running: jax.Array  # i32[], most sequences that run at one time, at most W
    # i32[], unpromised blocks needed to seat the first waiting sequence, a lower bound
    seating_needs: Blocks
    speculation: Any  # a `SpeculationState`, or None without speculation
    # i32[W], divergence point from known sequences; None without snapshots of recurrent
    # states.
    divergence: jax.Array | None
    # i32[N], cached tokens of each sequence at the start; such sequences stay open.
    # None if this loop opens and frees the sequences.
    before: jax.Array | None = None
    # i32[N], cached tokens that each such sequence can still get; None likewise.
    room: jax.Array | None = None
    # i32[N, 2], the last cached tokens of such sequences, which may be computed again;
    # None if they are not.
    recalled: jax.Array | None = None
    # A sequence without hidden states computes its last cached token again, for a
    # drafter; static.
    recomputes_last: bool = dataclasses.field(default=False, metadata={"static": True})
    # Cache rows without a place; None without a host that parks rolled sequences.
    kept: KeptRows | None = None
    # How sequences drop tokens, a `Shortening`; static.
    shortening: Any = dataclasses.field(default=None, metadata={"static": True})
    # Row counts of a step, ascending; static, as each compiles a program of its own.
    row_counts: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    # The fixed shape of all model calls, None if it varies; static.
    exact: Exact | None = dataclasses.field(metadata={"static": True})

    @property
    def num_samples(self) -> int:
        """The number of sequences of each prompt."""
        return self.result.tokens.shape[0] // self.prompts.tokens.shape[0]

    @property
    def is_running(self) -> jax.Array:
        """True for sequences that have not finished, running or waiting, bool[N]."""
        return self.result.reasons == FinishReason.RUNNING

    @property
    def seq_ids(self) -> jax.Array:
        """The cache row of each sequence, i32[N]; -1 for none."""
        places, num_sequences = self.places, self.result.lengths.shape[0]
        sequence = jnp.where(places.is_cached, places.sequences, num_sequences)
        nowhere = jnp.full((num_sequences,), NO_SEQUENCE, jnp.int32)
        return scatter(nowhere, sequence, places.seq_ids)

    @property
    def num_unfinished(self) -> jax.Array:
        """The number of unfinished samples of each prompt, i32[Q]."""
        by_prompt = self.is_running.reshape(-1, self.num_samples)
        return jnp.sum(by_prompt, axis=1, dtype=jnp.int32)

    def keeping_rows(self) -> Self:
        """Return the state for a host that parks rolled sequences."""
        kept = KeptRows.none(self.result.lengths.shape[0])
        return dataclasses.replace(self, kept=kept)

    def rows_of(self, logits_processor: LogitsProcessor | None) -> ProcessorRows | None:
        """Return the logits processor's rows of the W places, None without one."""
        return rows_of(
            logits_processor, self.prompts, self.result, self.places.sequences
        )

    def tokens_at(self, places: jax.Array, positions: jax.Array) -> jax.Array:
        """Return the tokens of `places`, i32[...], at `positions`, i32[...]."""
        return self._tokens_of(gather(self.places.sequences, places), positions)

    def newest(self, active: ActiveSequences) -> jax.Array:
        """Return the first token of each place that is not in the cache, i32[W]."""
        return self._tokens_of(self.places.sequences, active.done)

    def _tokens_of(self, sequences: jax.Array, positions: jax.Array) -> jax.Array:
        if self.before is None:
            return find_tokens(self.prompts, self.result, sequences, positions)
        positions = positions - gather(self.before, sequences)
        found = find_tokens(self.prompts, self.result, sequences, positions)
        if self.recalled is None:
            return found
        back = jnp.maximum(positions + self.recalled.shape[1], 0)
        earlier = gather(self.recalled, (sequences, back))
        return jnp.where(positions < 0, earlier, found)

    def count_least(self, active: ActiveSequences) -> jax.Array:
        """Return the least rows that each place can use, i32[W], with spans."""
        spans = self.prompts.spans
        assert spans is not None
        return spans.count_least(active.prompts, self._in_prompt(active.done))

    def end_at_spans(
        self, active: ActiveSequences, counts: jax.Array, most: jax.Array
    ) -> jax.Array:
        """Shorten the rows of places, i32[W], to end between spans.

        Args:
          active: the loads of the places.
          counts: i32[W], rows of a step that end at snapshots.
          most: i32[W], rows if no span ends at a snapshot.
        """
        spans = self.prompts.spans
        assert spans is not None
        given = active.prompts, self._in_prompt(active.done)
        shorter = spans.end_at_borders(*given, counts)
        return jnp.where(shorter > 0, shorter, spans.end_at_borders(*given, most))

    def mask_rows(
        self, active: ActiveSequences, places: jax.Array, positions: jax.Array
    ) -> SpanMask:
        """Return the mask of rows of `places` at `positions`, i32[R] each."""
        spans = self.prompts.spans
        assert spans is not None
        offset = self._in_prompt(active.done) - active.done
        done = gather(active.done + offset, places)
        in_prompt = positions + gather(offset, places)
        return spans.mask(gather(active.prompts, places), in_prompt, done)

    def _in_prompt(self, done: jax.Array) -> jax.Array:
        """Return cached tokens, i32[W], without those from before the loop."""
        if self.before is None:
            return done
        return done - gather(self.before, self.places.sequences)

    def progress(self, cache: Cache) -> Progress:
        """Return the lengths and stop conditions of the sequences in this cache."""
        size = self.block_size(cache)
        most: jax.Array | int = cache.max_context_length
        if self.room is not None:
            most = self.room
        bounds = Bounds(most, size, self.num_blocks, self.shortening)
        return Progress(self.prompts, self.stops, bounds, self.result)

    def block_size(self, cache: Cache) -> BlockSize:
        """Return how many blocks a sequence needs at most in a step of this cache."""
        return blocks.find_block_size(cache, self.row_counts)

    def active(self, cache: Cache) -> ActiveSequences:
        """Return the sequences in all places."""
        places, num_samples = self.places, jnp.int32(self.num_samples)
        prompt = jax.lax.div(places.sequences, num_samples)
        prompt_lengths = gather(self.prompts.lengths, prompt)
        if self.before is not None:
            prompt_lengths = prompt_lengths + gather(self.before, places.sequences)
        slots = blocks.count_cached(cache, places.seq_ids)
        return ActiveSequences(
            prompts=prompt,
            prompt_lengths=prompt_lengths,
            sequence_lengths=prompt_lengths
            + gather(self.result.lengths, places.sequences),
            done=blocks.count_positions(cache, places.seq_ids, slots),
            slots=slots,
            held=Held.of(cache, places.seq_ids),
        )

    def demand(self, cache: Cache, active: ActiveSequences) -> Blocks:
        """Return the blocks each running sequence still needs, i32[W] per group.

        A sample without a row counts only its blocks beside the shared prompt.
        """
        places, size = self.places, self.block_size(cache)
        prompts, lengths = active.prompt_lengths, active.sequence_lengths
        slots = active.slots_at_end
        if self.shortening is not None:
            slots = self.shortening.bound(slots)
            lengths = self.shortening.slots(prompts, lengths)
            prompts = self.shortening.shared(prompts)
        own = blocks.beside_prompt(prompts, lengths, size)
        more = blocks.to_take(slots, active.held, size)
        pairs = zip(more, own, strict=True)
        needs = [jnp.where(places.is_cached, *each) for each in pairs]
        return tuple(jnp.where(places.is_running, need, 0) for need in needs)


def note_sequences(state: GenerationState, lanes: jax.Array) -> GenerationState:
    """Record the tokens of the sequences in places `lanes`, i32[K]; W for none."""
    sequences = gather(state.places.sequences, lanes)
    tokens, _ = find_sequences(state.prompts, state.result, sequences)
    token = jnp.where(tokens < 0, state.seen.shape[1], tokens)
    seen = scatter(state.seen, lanes, False)
    seen = scatter(seen, (lanes[:, None], token), True)
    return dataclasses.replace(state, seen=seen)
