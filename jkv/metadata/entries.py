"""Flat work: the entries of all requests of a call in one list, some hundred a trip.

Entry e of the call belongs to the request whose range of a running sum holds e, so that
the cost follows the blocks that are touched.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jkv.indexing import gather, scatter_add
from jkv.metadata.mentions import MOST_COMPARED
from jkv.metadata.xla_cpu import running_sum
from jkv.sharding.loops import fori_loop

Carry = TypeVar("Carry")

# Entries worked on per trip of a flat loop: enough to hide the cost of a trip, few
# enough that a call which frees one sequence does little more than that.
ENTRIES_PER_TRIP = 512


def find_owners(starts: jax.Array, first: jax.Array | int, width: int) -> jax.Array:
    """Return the last of B ranges that starts at or before each of P indices, i32[P].

    The starts, i32[B], ascend from 0 on; the indices follow each other from the first.
    """
    if starts.shape[0] <= MOST_COMPARED:
        index = first + jnp.arange(width, dtype=jnp.int32)
        begun = starts[None] <= index[:, None]
        return jnp.sum(begun, axis=1, dtype=jnp.int32) - 1
    # As many ranges begin up to an index as there are up to its owner.
    index = jnp.maximum(starts - first, 0)
    begun = scatter_add(jnp.zeros((width,), jnp.int32), index, 1)
    return running_sum(begun) - 1


class Entries(NamedTuple):
    """P entries of all requests, one after the other."""

    number: jax.Array  # i32[P], of each among all
    request: jax.Array  # i32[P], the one that has it
    rank: jax.Array  # i32[P], its number within its request
    valid: jax.Array  # bool[P]


def find_chunk(counts: jax.Array, width: int) -> tuple[Entries, jax.Array]:
    """Find the first P entries of requests, which have i32[B]; count these, i32[B]."""
    ends = running_sum(counts)
    starts = ends - counts
    num_done = jnp.clip(width - starts, 0, counts)
    return list_entries(starts, ends[-1], 0, width), num_done


def list_entries(
    starts: jax.Array, end: jax.Array, first: jax.Array | int, width: int
) -> Entries:
    """List P entries from a number on, of requests whose entries start at i32[B].

    Those at `end`, i32[], and behind it are not valid.
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
    """Run `body` over all entries of requests, i32[B] each, some hundred at a time.

    A loop, because the number of entries is known only at run time: one dense pass
    would cost B * M for every call, this costs what is there, nothing for nothing.
    Entries come in request order; `max_entries` is a static bound.
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
