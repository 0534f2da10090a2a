"""Duplicate ids among lanes: the first or last lane of each id, and ranks.

A few lanes are compared pairwise. Many use a scatter of minima, which is linear in the
lanes, but slower for a few of them and slower to compile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.indexing import gather, scatter, scatter_min
from jkv.metadata.xla_cpu import written_after

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
