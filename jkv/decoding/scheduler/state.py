"""A generation under way: what was asked, what has come of it, and what runs.

A sequence is *seated* when it gets a place, and keeps it until it ends. Age is the
order of seating. The youngest are preempted first, and preempted ones are seated again
before any that never ran: so the places by age are the running ones, then the preempted
ones, then the empty ones, and to preempt or to seat again moves one border.

Symbols: N sequences, Q prompts, W places, V tokens in the vocabulary, K lanes.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.model.steps import Exact
from jkv.decoding.sampling.next_token import Bounds, Progress
from jkv.decoding.steering.rows import SteeredRows, rows_of
from jkv.decoding.texts import blocks
from jkv.decoding.texts.blocks import Blocks, BlockSize, Held
from jkv.decoding.texts.prompts import Prompts, Stops, find_texts, find_tokens
from jkv.decoding.texts.results import FinishReason, Generation
from jkv.indexing import gather, scatter
from jkv.metadata.xla_cpu import running_sum
from jkv.state import NO_SEQUENCE, Cache, Ring
from jkv.steering import Steering

# Sequences that one trip of a loop opens or frees. A trip costs all of its lanes, and
# mostly few sequences end in a step.
LANES = 16


class Places(NamedTuple):
    """W places, each for one sequence at a time."""

    sequences: jax.Array  # i32[W], the sequence of each place, any where it is empty
    seq_ids: jax.Array  # i32[W], its row in the cache, -1 where it has none
    ages: jax.Array  # i32[W], places by age count from 0: a permutation
    num_running: jax.Array  # i32[], the oldest ones
    num_started: jax.Array  # i32[], running and preempted

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
        """Seat open sequences, i32[N], in as many places or more; NO_SEQUENCE ends."""
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
        """Places, W."""
        return self.ages.shape[0]

    @property
    def is_running(self) -> jax.Array:
        """Whether a sequence runs in each place, bool[W]."""
        return self.ages < self.num_running

    @property
    def is_started(self) -> jax.Array:
        """Whether each place is taken, by a preempted sequence too, bool[W]."""
        return self.ages < self.num_started

    @property
    def is_cached(self) -> jax.Array:
        """Whether the sequence of each place is in the cache, bool[W]."""
        return self.seq_ids >= 0

    @property
    def is_pending(self) -> jax.Array:
        """Whether the sequence runs, but is not in the cache yet, bool[W]."""
        return self.is_running & ~self.is_cached


def sort_by_age(places: Places) -> jax.Array:
    """Return the places from the oldest to the youngest, i32[W]."""
    place = jnp.arange(places.num_places, dtype=jnp.int32)
    return jnp.zeros_like(place).at[places.ages].set(place)


def find_chosen(
    chosen: jax.Array,  # bool[P]
    num_lanes: int,  # K, static
) -> jax.Array:
    """Return the first indices that are chosen, i32[K]; P where there are no more."""
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
    """Return the oldest places that are chosen, i32[K]; W where there are no more."""
    chosen_by_age = jnp.zeros_like(chosen).at[places.ages].set(chosen)
    age = find_chosen(chosen_by_age, num_lanes)
    by_age = sort_by_age(places)
    return gather(by_age, age, fill=places.num_places)


def find_youngest_running(places: Places) -> jax.Array:
    """Return the running place that is preempted next, i32[]; W if none runs."""
    is_youngest = places.ages == places.num_running - 1
    youngest = jnp.argmax(is_youngest).astype(jnp.int32)
    return jnp.where(places.num_running > 0, youngest, places.num_places)


def unseat_youngest(places: Places) -> Places:
    """Let the youngest running sequence wait; its row of the cache is freed."""
    youngest = find_youngest_running(places)
    return places._replace(
        seq_ids=scatter(places.seq_ids, youngest, NO_SEQUENCE),
        num_running=jnp.maximum(places.num_running - 1, 0),
    )


def vacate(places: Places, ended: jax.Array) -> Places:
    """Empty the places of ended sequences, bool[W]; the others keep their order."""
    ended = ended & places.is_started
    ended_by_age = jnp.zeros_like(ended).at[places.ages].set(ended).astype(jnp.int32)
    upto = running_sum(ended_by_age)
    older = gather(upto - ended_by_age, places.ages)
    num_ended = upto[-1]
    num_started = places.num_started - num_ended
    # Empty places follow those that are left; those emptied just now come first.
    moved = jnp.where(ended, num_started + older, places.ages - older)
    num_stopped = jnp.sum(ended & places.is_running, dtype=jnp.int32)
    return places._replace(
        seq_ids=jnp.where(ended, NO_SEQUENCE, places.seq_ids),
        ages=jnp.where(places.is_started, moved, places.ages),
        num_running=places.num_running - num_stopped,
        num_started=num_started,
    )


class Holder(NamedTuple):
    """A prompt that is kept in the cache for samples that wait."""

    seq_id: jax.Array  # i32[], its row in the cache, -1 if there is none
    prompt: jax.Array  # i32[], which prompt it has, any if there is none

    @classmethod
    def none(cls) -> "Holder":
        return cls(seq_id=jnp.full((), NO_SEQUENCE, jnp.int32), prompt=jnp.int32(0))

    def holds(self, prompts: jax.Array) -> jax.Array:
        """Return which of these prompts, i32[K], it has, bool[K]."""
        return (self.seq_id >= 0) & (prompts == self.prompt)


class Loads(NamedTuple):
    """What the sequence of each of W places has, anything where a place is empty."""

    prompts: jax.Array  # i32[W], its prompt
    prompt_lengths: jax.Array  # i32[W], tokens of that
    text_lengths: jax.Array  # i32[W], those generated too
    done: jax.Array  # i32[W], tokens in the cache, 0 where it is not there
    held: Held  # its blocks, i32[W]

    def count_left(self, places: Places) -> jax.Array:
        """Return the tokens of each yet to be computed, i32[W]; 0 out of the cache."""
        return jnp.where(places.is_cached, self.text_lengths - self.done, 0)

    @property
    def has_prompt(self) -> jax.Array:
        """Whether all of its prompt is in the cache, bool[W]."""
        return self.done >= self.prompt_lengths


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GenerationState:
    """A generation under way: what `prefill` returns and `decode` carries on.

    The last token of each running sequence has been chosen but is not in the cache.
    """

    result: Generation  # what there is so far
    prompts: Prompts  # what is continued, and how far
    stops: Stops  # what ends a sequence
    places: Places  # what runs
    queue: Ring  # i32[N], sequences that have never run, in order
    holder: Holder  # a prompt that is kept for samples that wait
    seen: jax.Array  # bool[W, V], tokens of the text in each place
    num_blocks: Blocks  # i32[], those that a sequence would find alone
    most_running: jax.Array  # i32[], sequences that run at one time, at most W
    # i32[], unpromised blocks that the first sequence that waits needs at least
    seating_needs: Blocks
    speculation: Any  # a `SpeculationState`, None where nothing is guessed
    # i32[W], up to where the text in each place is like one that is known; None where
    # no layer keeps a state that could be found again.
    partings: jax.Array | None
    # i32[N], tokens that each had in the cache when it began, and stays open with; None
    # where sequences are opened here, and freed.
    before: jax.Array | None = None
    # Rows that a step may have, ascending; static, as each is a program of its own.
    row_counts: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    # The one shape of all calls of the model, None where it may vary; static.
    exact: Exact | None = dataclasses.field(metadata={"static": True})

    @property
    def num_samples(self) -> int:
        """Sequences of each prompt."""
        return self.result.tokens.shape[0] // self.prompts.tokens.shape[0]

    @property
    def is_running(self) -> jax.Array:
        """Whether each sequence goes on, running or waiting, bool[N]."""
        return self.result.reasons == FinishReason.RUNNING

    @property
    def seq_ids(self) -> jax.Array:
        """The row of the cache that each sequence has, i32[N]; -1 where none."""
        places, num_sequences = self.places, self.result.lengths.shape[0]
        sequence = jnp.where(places.is_cached, places.sequences, num_sequences)
        nowhere = jnp.full((num_sequences,), NO_SEQUENCE, jnp.int32)
        return scatter(nowhere, sequence, places.seq_ids)

    @property
    def num_unfinished(self) -> jax.Array:
        """Samples of each prompt that have not ended, i32[Q]."""
        by_prompt = self.is_running.reshape(-1, self.num_samples)
        return jnp.sum(by_prompt, axis=1, dtype=jnp.int32)

    def rows_of(self, steering: Steering | None) -> SteeredRows | None:
        """Return what steers the text in each place, W rows; None if nothing does."""
        return rows_of(steering, self.prompts, self.result, self.places.sequences)

    def tokens_at(self, places: jax.Array, positions: jax.Array) -> jax.Array:
        """Return tokens of the texts in places, i32[...], at positions, i32[...]."""
        return self._tokens_of(gather(self.places.sequences, places), positions)

    def newest(self, loads: Loads) -> jax.Array:
        """Return the first token of the text in each place that the cache lacks."""
        return self._tokens_of(self.places.sequences, loads.done)

    def _tokens_of(self, sequences: jax.Array, positions: jax.Array) -> jax.Array:
        if self.before is not None:
            positions = positions - gather(self.before, sequences)
        return find_tokens(self.prompts, self.result, sequences, positions)

    def progress(self, cache: Cache) -> Progress:
        """How far the texts have come, and what ends them in this cache."""
        size = self.block_size(cache)
        most: jax.Array | int = cache.max_context_length
        if self.before is not None:
            most = most - self.before
        bounds = Bounds(most, size, self.num_blocks)
        return Progress(self.prompts, self.stops, bounds, self.result)

    def block_size(self, cache: Cache) -> BlockSize:
        """How many blocks a text takes in this cache, in steps of these rows."""
        return blocks.find_block_size(cache, self.row_counts)

    def loads(self, cache: Cache) -> Loads:
        """What the sequence of each place has."""
        places, num_samples = self.places, jnp.int32(self.num_samples)
        prompt = jax.lax.div(places.sequences, num_samples)
        prompt_lengths = gather(self.prompts.lengths, prompt)
        if self.before is not None:
            prompt_lengths = prompt_lengths + gather(self.before, places.sequences)
        return Loads(
            prompts=prompt,
            prompt_lengths=prompt_lengths,
            text_lengths=prompt_lengths + gather(self.result.lengths, places.sequences),
            done=blocks.count_cached(cache, places.seq_ids),
            held=Held.of(cache, places.seq_ids),
        )

    def demand(self, cache: Cache, loads: Loads) -> Blocks:
        """Blocks that the running sequence of each place needs for its text, i32[W].

        A sample that waits for its prompt will share it.
        """
        places, size = self.places, self.block_size(cache)
        own = blocks.beside_prompt(loads.prompt_lengths, loads.text_lengths, size)
        more = blocks.to_take(loads.text_lengths, loads.held, size)
        pairs = zip(more, own, strict=True)
        needs = [jnp.where(places.is_cached, *each) for each in pairs]
        return tuple(jnp.where(places.is_running, need, 0) for need in needs)


def note_texts(state: GenerationState, lanes: jax.Array) -> GenerationState:
    """Note which tokens the texts in places have, i32[K]; W is no place."""
    sequences = gather(state.places.sequences, lanes)
    texts, _ = find_texts(state.prompts, state.result, sequences)
    token = jnp.where(texts < 0, state.seen.shape[1], texts)
    seen = scatter(state.seen, lanes, False)
    seen = scatter(seen, (lanes[:, None], token), True)
    return dataclasses.replace(state, seen=seen)
