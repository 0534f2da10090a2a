"""Lanes of a call that have equal keys: which comes first, and how many before each.

All lanes are compared with each other. That costs the square of their number, but
little to compile, so longer calls are cut into trips of `LANES_PER_TRIP`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata.mentions import MOST_COMPARED

LANES_PER_TRIP = MOST_COMPARED


class Equals(NamedTuple):
    """The active lanes with the same key as each of P lanes."""

    first: jax.Array  # i32[P], the first of them, P where none is active
    rank: jax.Array  # i32[P], how many of them come before it


def find_equals(keys: jax.Array, active: jax.Array) -> Equals:
    """Compare the keys of all lanes, [P], with those of active ones, bool[P]."""
    num_lanes = keys.shape[0]
    lane = jnp.arange(num_lanes, dtype=jnp.int32)
    is_equal = (keys[:, None] == keys[None]) & active[None]
    candidates = jnp.where(is_equal, lane[None], num_lanes)
    first = jnp.min(candidates, axis=1, initial=num_lanes)
    earlier = np.tri(num_lanes, k=-1, dtype=bool)
    return Equals(first, jnp.sum(is_equal & earlier, axis=1, dtype=jnp.int32))
