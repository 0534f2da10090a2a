"""Lanes of a call: duplicate ids among them, and flat loops over all entries.

A few lanes are compared pairwise to find the first or last of each id. Many use a
scatter of minima, which is linear in the lanes, but slower for a few of them and slower
to compile.

A flat loop visits the entries of all requests in chunks. An entry belongs to the
request whose range of a running sum contains it, so the cost follows the number of
blocks touched.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jkv.indexing import gather, scatter, scatter_add, scatter_min
from jkv.metadata.xla_cpu import running_sum, written_after
from jkv.sharding.loops import fori_loop

# Pairwise comparison is quadratic in the lanes.
MOST_COMPARED = 64


def is_first(ids: jax.Array, size: int) -> jax.Array:
    """Return True where no earlier lane has the same id, bool[P]; none is negative."""
    num_lanes = ids.shape[0]
    if num_lanes <= MOST_COMPARED:
        earlier = np.tri(num_lanes, k=-1, dtype=bool)
        named_before = jnp.any((ids[:, None] == ids[None]) & earlier, axis=1)
        return ~named_before | (ids >= size)
    lane = jnp.arange(num_lanes, dtype=jnp.int32)
    earliest = scatter_min(jnp.full((size,), num_lanes, jnp.int32), ids, lane)
    last = jnp.iinfo(jnp.int32).max
    return gather(earliest, ids, fill=last) >= lane


def find_one(
    marks: jax.Array, ids: jax.Array, *, last: bool
) -> tuple[jax.Array, jax.Array]:
    """Select one lane for each distinct id, i32[P]: the first, or the last.

    `marks`, i32[N], is an array of zeros that the caller already has; it saves a
    scratch array of that size. Return it unchanged, and bool[P].
    """
    nothing, num_lanes = marks.shape[0], ids.shape[0]
    if num_lanes <= MOST_COMPARED:
        others = np.tri(num_lanes, k=-1, dtype=bool)
        others = others.T if last else others
        is_named = jnp.any((ids[:, None] == ids[None]) & others, axis=1)
        return marks, ~is_named & (ids < nothing)
    lane = jnp.arange(num_lanes, dtype=jnp.int32)
    key = -1 - lane if last else lane - num_lanes
    marked = scatter_min(marks, ids, key)
    lowest = gather(marked, ids, fill=0) == key
    lowest &= ids < nothing
    return scatter(marked, written_after(lowest, ids, nothing), 0), lowest


class Equals(NamedTuple):
    """The active lanes with the same key as each of P lanes."""

    first: jax.Array  # i32[P], the first such lane, P if none
    rank: jax.Array  # i32[P], number of such lanes before this one


def find_equals(keys: jax.Array, active: jax.Array) -> Equals:
    """Compare the keys of all lanes, [P], with active ones, bool[P]."""
    num_lanes = keys.shape[0]
    lane = jnp.arange(num_lanes, dtype=jnp.int32)
    is_equal = (keys[:, None] == keys[None]) & active[None]
    candidates = jnp.where(is_equal, lane[None], num_lanes)
    first = jnp.min(candidates, axis=1, initial=num_lanes)
    earlier = np.tri(num_lanes, k=-1, dtype=bool)
    return Equals(first, jnp.sum(is_equal & earlier, axis=1, dtype=jnp.int32))


Carry = TypeVar("Carry")

# Entries per trip of a flat loop: enough to hide the overhead of a trip, few enough
# that a call which frees one sequence does little more.
ENTRIES_PER_TRIP = 512


def find_owners(starts: jax.Array, first: jax.Array | int, width: int) -> jax.Array:
    """Return the last of B ranges that starts at or before each of P indices, i32[P].

    The starts, i32[B], ascend from 0; the indices are consecutive from `first`.
    """
    if starts.shape[0] <= MOST_COMPARED:
        index = first + jnp.arange(width, dtype=jnp.int32)
        begun = starts[None] <= index[:, None]
        return jnp.sum(begun, axis=1, dtype=jnp.int32) - 1
    # The ranges begun up to an index end with its owner.
    index = jnp.maximum(starts - first, 0)
    begun = scatter_add(jnp.zeros((width,), jnp.int32), index, 1)
    return running_sum(begun) - 1


class Entries(NamedTuple):
    """P consecutive entries of the concatenated requests."""

    number: jax.Array  # i32[P], index among all entries
    request: jax.Array  # i32[P], its request
    rank: jax.Array  # i32[P], index within its request
    valid: jax.Array  # bool[P]


def find_chunk(counts: jax.Array, width: int) -> tuple[Entries, jax.Array]:
    """Return the first P entries of counts, i32[B], and their number per request."""
    ends = running_sum(counts)
    starts = ends - counts
    num_done = jnp.clip(width - starts, 0, counts)
    return list_entries(starts, ends[-1], 0, width), num_done


def list_entries(
    starts: jax.Array, end: jax.Array, first: jax.Array | int, width: int
) -> Entries:
    """List P entries from `first` on, of requests whose entries start at i32[B].

    Entries at and after `end`, i32[], are invalid.
    """
    number = first + jnp.arange(width, dtype=jnp.int32)
    request = find_owners(starts, first, width)
    return Entries(number, request, number - gather(starts, request), number < end)


def for_each_entry(
    counts: jax.Array,
    max_entries: int,
    body: Callable[[Carry, Entries], Carry],
    carry: Carry,
    width: int = ENTRIES_PER_TRIP,
) -> Carry:
    """Run `body` over the entries of all requests, i32[B] each, in chunks.

    The number of entries is known only at run time: a dense pass would cost B * M in
    every call, the loop costs only its entries. Entries come in request order;
    `max_entries` is a static bound.
    """
    if counts.shape[0] == 0 or max_entries == 0:
        return carry
    ends = running_sum(counts)
    starts = ends - counts
    width = min(max_entries, width)

    def trip(i: jax.Array, carry: Carry) -> Carry:
        return body(carry, list_entries(starts, ends[-1], i * width, width))

    num_trips = (ends[-1] + width - 1) // width
    return fori_loop(jnp.int32(0), num_trips, trip, carry)


def for_each_of(
    mask: jax.Array, trip: Callable[[jax.Array, Carry], Carry], carry: Carry
) -> Carry:
    """Call `trip(request i32[1], carry)` for each request of a mask, in order."""
    return for_each_entry(
        mask.astype(jnp.int32),
        mask.shape[0],
        lambda carry, at: trip(at.request, carry),
        carry,
        width=1,
    )
