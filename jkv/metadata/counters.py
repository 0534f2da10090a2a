"""Counters and the logical clock: what happened since `init`, in 64 bits.

JAX has no 64-bit integers by default, so a counter is two 32-bit words. The clock is a
counter too: it goes on by one with each call that serves a request, and its low word is
the stamp that says when a sequence was opened and last used. What left the pools each
ring counts for itself (`jkv.state.rings`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.metadata import mentions
from jkv.metadata.xla_cpu import stage
from jkv.state import Sequences
from jkv.status import NUM_COUNTERS, Counter, Status


def add(sequences: Sequences, increments: dict[Counter, jax.Array]) -> Sequences:
    """Add to some counters, each increment i32[] or u32[], at least 0."""
    kind = jnp.arange(NUM_COUNTERS, dtype=jnp.int32)
    rows = jnp.zeros((NUM_COUNTERS,), jnp.uint32)
    for counter, increment in increments.items():
        rows = jnp.where(kind == counter, increment.astype(jnp.uint32), rows)
    return _add_all(sequences, rows)


@stage
def settle(sequences: Sequences, status: jax.Array, served: jax.Array) -> Sequences:
    """Count what became of a call's requests, and let the clock tick if any was served.

    Args:
      sequences: the state.
      status: i32[B], `Status` of each request.
      served: bool[B], requests that changed something.
    """
    # Each request adds one to its row.
    row = jnp.where(served, jnp.int32(Counter.CLOCK), status)
    row = jnp.where(served | (status != Status.OK), row, NUM_COUNTERS)
    counts = _count(row)
    kind = jnp.arange(NUM_COUNTERS, dtype=jnp.int32)
    counts = jnp.where(kind == Counter.CLOCK, jnp.minimum(counts, 1), counts)
    return _add_all(sequences, counts.astype(jnp.uint32))


def _count(row: jax.Array) -> jax.Array:
    """Return how often each counter is among rows, i32[B], as i32[counters]."""
    if row.shape[0] <= mentions.MOST_COMPARED:
        kind = jnp.arange(NUM_COUNTERS, dtype=jnp.int32)
        return jnp.sum(row[:, None] == kind[None], axis=0, dtype=jnp.int32)
    return jnp.zeros((NUM_COUNTERS,), jnp.int32).at[row].add(1, mode="drop")


def mark_opened(sequences: Sequences, row: jax.Array) -> Sequences:
    """Stamp rows, i32[B], as opened by the next tick; one of S or above is dropped."""
    stamp = sequences.now + jnp.uint32(1)
    return dataclasses.replace(
        sequences,
        created=sequences.created.at[row].set(stamp, mode="drop"),
        last_used=sequences.last_used.at[row].set(stamp, mode="drop"),
        num_uses=sequences.num_uses.at[row].set(jnp.uint32(0), mode="drop"),
    )


@stage
def mark_used(sequences: Sequences, row: jax.Array) -> Sequences:
    """Stamp rows, i32[B], as used by the next tick; one of S or above is dropped."""
    stamp = sequences.now + jnp.uint32(1)
    return dataclasses.replace(
        sequences,
        last_used=sequences.last_used.at[row].set(stamp, mode="drop"),
        num_uses=sequences.num_uses.at[row].add(jnp.uint32(1), mode="drop"),
    )


def _add_all(sequences: Sequences, increments: jax.Array) -> Sequences:
    """Add u32[counters] to the counters, carrying into the high words."""
    old = sequences.counters
    low = old[:, 0] + increments
    high = old[:, 1] + (low < old[:, 0]).astype(jnp.uint32)
    return dataclasses.replace(sequences, counters=jnp.stack([low, high], axis=1))
