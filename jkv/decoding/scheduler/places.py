"""Places: which sequences run, which were preempted, and how old each one is.

A sequence is *seated* when it gets a place, and keeps it until it ends. Age is the
order of seating. The youngest are preempted first, and preempted ones are seated again
before any that never ran: so the places by age are the running ones, then the preempted
ones, then the empty ones, and to preempt or to seat again moves one border.

Symbols: W places, K lanes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.indexing import gather, scatter
from jkv.metadata.xla_cpu import running_sum
from jkv.state import NO_SEQUENCE

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
