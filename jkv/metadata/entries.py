"""Flat work: the entries of all requests of a call in one list, some hundred a trip.

Entry e of the call belongs to the request whose range of a running sum holds e, so that
the cost follows the blocks that are touched.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jkv.metadata.mentions import MOST_COMPARED
from jkv.metadata.xla_cpu import running_sum
from jkv.sharding.loops import fori_loop
from jkv.sharding.varying import is_manual

Carry = TypeVar("Carry")


# Entries worked on per trip of a flat loop: enough to hide the cost of a trip, few
# enough that a call which frees one sequence does little more than that.
ENTRIES_PER_TRIP = 512


def find_owners(starts: jax.Array, places: jax.Array) -> jax.Array:
    """Return the last of B ranges that starts at or before each place, i32[P].

    Args:
      starts: i32[B], ascending from 0 on.
      places: i32[P], not negative.
    """
    if is_manual():
        # JAX cannot trace a search where only some axes of a mesh are manual.
        before = starts[None] <= places[:, None]
        return jnp.sum(before, axis=1, dtype=jnp.int32) - 1
    # A search is a loop of small operations; a comparison of all is one.
    method = "compare_all" if starts.shape[0] <= MOST_COMPARED else "scan"
    later = jnp.searchsorted(starts, places, side="right", method=method)
    return later.astype(jnp.int32) - 1


def for_each_entry(
    counts: jax.Array,
    max_entries: int,
    body: Callable[[Carry, jax.Array, jax.Array, jax.Array, jax.Array], Carry],
    carry: Carry,
) -> Carry:
    """Run `body` over all entries of all requests, some hundred at a time.

    A loop, because the number of entries is known only at run time: one dense pass
    would cost B * M for every call, this costs what is there, nothing for nothing.

    Args:
      counts: i32[B], entries of each request.
      max_entries: static bound on their sum.
      body: `body(carry, entry i32[P], request i32[P], rank i32[P], valid bool[P])`;
        entries come in request order, `rank` counts within the request.
      carry: what the body passes on.
    """
    if counts.shape[0] == 0 or max_entries == 0:
        return carry
    ends = running_sum(counts)
    starts = ends - counts
    width = min(max_entries, ENTRIES_PER_TRIP)

    def trip(i: jax.Array, carry: Carry) -> Carry:
        entry = i * width + jnp.arange(width, dtype=jnp.int32)
        request = find_owners(starts, entry)
        rank = entry - starts[request]
        return body(carry, entry, request, rank, entry < ends[-1])

    num_trips = (ends[-1] + width - 1) // width
    return fori_loop(jnp.int32(0), num_trips, trip, carry)
