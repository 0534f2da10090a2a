"""The queue: which of the sequences that wait get a place, strictly in order.

Preempted sequences come before those that never ran, which wait in a ring: the queue.
The first that does not fit shuts out all behind it.

Symbols: N sequences, W places, K lanes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.decoding.scheduler.places import Places, sort_by_age
from jkv.decoding.texts.blocks import Blocks, reach
from jkv.metadata import ring
from jkv.metadata.xla_cpu import running_sum
from jkv.state import Ring


def make_queue(waiting: jax.Array) -> Ring:
    """Return a queue of the chosen ones of N sequences, bool[N], in order."""
    sequence = jnp.arange(waiting.shape[0], dtype=jnp.int32)
    return ring.push(_empty_queue(waiting.shape[0]), sequence, waiting)


def drop_from_queue(queue: Ring, ended: jax.Array) -> Ring:
    """Return the queue without the sequences that ended, bool[N]."""
    rank = jnp.arange(queue.ids.shape[0], dtype=jnp.int32)
    sequences = ring.peek(queue, rank)
    stays = (rank < queue.count) & ~ended[sequences]
    return ring.push(_empty_queue(rank.shape[0]), sequences, stays)


def order_queue(queue: Ring, ranks: jax.Array) -> Ring:
    """Order a queue by the ranks of N sequences, i32[N]; equal ones stay."""
    index = jnp.arange(queue.ids.shape[0], dtype=jnp.int32)
    sequences, waits = ring.peek(queue, index), index < queue.count
    last = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(waits, ranks[sequences], last), stable=True)
    return ring.push(_empty_queue(index.shape[0]), sequences[order], waits[order])


def _empty_queue(size: int) -> Ring:
    ids, bounds = jnp.zeros((size,), jnp.int32), jnp.zeros((8,), jnp.int32)
    return Ring(ids=ids, bounds=bounds, indices=None)


class Candidates(NamedTuple):
    """The first K that wait, in order."""

    sequences: jax.Array  # i32[K], any where there are no more
    exists: jax.Array  # bool[K]
    is_fresh: jax.Array  # bool[K], whether it never ran


def find_candidates(
    places: Places,
    queue: Ring,  # the sequences that never ran
    num_lanes: int,  # K, static
) -> Candidates:
    lane = jnp.arange(num_lanes, dtype=jnp.int32)
    num_preempted = places.num_started - places.num_running
    fresh_rank = lane - num_preempted
    is_fresh = fresh_rank >= 0
    place = sort_by_age(places).at[places.num_running + lane].get(mode="clip")
    fresh = ring.peek(queue, jnp.clip(fresh_rank, 0, queue.count))
    return Candidates(
        sequences=jnp.where(is_fresh, fresh, places.sequences[place]),
        exists=~is_fresh | (fresh_rank < queue.count),
        is_fresh=is_fresh,
    )


class Seated(NamedTuple):
    """What becomes of K candidates."""

    seated: jax.Array  # bool[K], those that get a place
    passed: jax.Array  # bool[K], those that wait no longer: seated, or ended before


def choose_seated(
    candidates: Candidates,
    # bool[K], those that have ended while they waited; they need nothing
    ended: jax.Array,
    costs: Blocks,  # i32[K], blocks that each needs
    *,
    num_free_blocks: Blocks,  # i32[], blocks that were promised to no sequence
    num_free_places: jax.Array,  # i32[]
) -> Seated:
    """Choose which get a place: all up to the first that does not fit."""
    alive = candidates.exists & ~ended
    blocks = tuple(running_sum(jnp.where(alive, cost, 0)) for cost in costs)
    ranks = running_sum(alive.astype(jnp.int32))
    fits = reach(num_free_blocks, blocks) & (ranks <= num_free_places)
    stops = ~candidates.exists | (alive & ~fits)
    passed = running_sum(stops.astype(jnp.int32)) == 0
    return Seated(passed & alive, passed)


def seat(
    places: Places, queue: Ring, candidates: Candidates, result: Seated
) -> tuple[Places, Ring]:
    """Give the chosen ones their places, those that are free or their own."""
    rank = running_sum(result.seated.astype(jnp.int32)) - 1
    place = sort_by_age(places).at[places.num_running + rank].get(mode="clip")
    place = jnp.where(result.seated, place, places.num_places)
    num_fresh = jnp.sum(result.seated & candidates.is_fresh, dtype=jnp.int32)
    num_left = jnp.sum(result.passed & candidates.is_fresh, dtype=jnp.int32)
    places = places._replace(
        sequences=places.sequences.at[place].set(candidates.sequences, mode="drop"),
        num_running=places.num_running + rank[-1] + 1,
        num_started=places.num_started + num_fresh,
    )
    return places, ring.pop(queue, num_left)
