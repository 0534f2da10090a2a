"""Counters and the logical clock: what happened since `init`, in 64 bits.

JAX has no 64-bit integers by default, so a counter is two 32-bit words. The clock is a
counter too: it goes on by one with each call that serves a request, and its low word is
the stamp that says when a sequence was opened and last used.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.metadata import mentions
from jkv.metadata.xla_cpu import stage
from jkv.state import Metadata
from jkv.status import NUM_COUNTERS, Counter, Status


def add(metadata: Metadata, increments: dict[Counter, jax.Array]) -> Metadata:
    """Add to some counters, each increment i32[] or u32[], at least 0."""
    kind = jnp.arange(NUM_COUNTERS, dtype=jnp.int32)
    rows = jnp.zeros((NUM_COUNTERS,), jnp.uint32)
    for counter, increment in increments.items():
        rows = jnp.where(kind == counter, increment.astype(jnp.uint32), rows)
    return _add_all(metadata, rows)


@stage
def settle(
    metadata: Metadata,
    status: jax.Array,
    served: jax.Array,
    num_blocks: jax.Array | None = None,
) -> tuple[Metadata, jax.Array]:
    """Count what became of a call's requests, and let the clock tick if any was served.

    Args:
      metadata: the state.
      status: i32[B], `Status` of each request.
      served: bool[B], requests that changed something.
      num_blocks: i32[B], blocks each request takes, 0 where it is not served; None if
        none takes any.

    Returns:
      The new metadata and i32[], the blocks taken in all.
    """
    # Each request adds one to its row.
    row = jnp.where(served, jnp.int32(Counter.CLOCK), status)
    row = jnp.where(served | (status != Status.OK), row, NUM_COUNTERS)
    counts = _count(row)
    taken = jnp.int32(0)
    if num_blocks is not None:
        taken = jnp.sum(num_blocks, dtype=jnp.int32)
    kind = jnp.arange(NUM_COUNTERS, dtype=jnp.int32)
    counts = jnp.where(kind == Counter.CLOCK, jnp.minimum(counts, 1), counts)
    counts = jnp.where(kind == Counter.BLOCKS_TAKEN, taken, counts)
    return _add_all(metadata, counts.astype(jnp.uint32)), taken


def _count(row: jax.Array) -> jax.Array:
    """Return how often each counter is among rows, i32[B], as i32[counters]."""
    if row.shape[0] <= mentions.MOST_COMPARED:
        kind = jnp.arange(NUM_COUNTERS, dtype=jnp.int32)
        return jnp.sum(row[:, None] == kind[None], axis=0, dtype=jnp.int32)
    return jnp.zeros((NUM_COUNTERS,), jnp.int32).at[row].add(1, mode="drop")


def mark_opened(metadata: Metadata, row: jax.Array) -> Metadata:
    """Stamp rows, i32[B], as opened by the next tick; one of S or above is dropped."""
    stamp = metadata.now + jnp.uint32(1)
    return dataclasses.replace(
        metadata,
        created=metadata.created.at[row].set(stamp, mode="drop"),
        last_used=metadata.last_used.at[row].set(stamp, mode="drop"),
        num_uses=metadata.num_uses.at[row].set(jnp.uint32(0), mode="drop"),
    )


@stage
def mark_used(metadata: Metadata, row: jax.Array) -> Metadata:
    """Stamp rows, i32[B], as used by the next tick; one of S or above is dropped."""
    stamp = metadata.now + jnp.uint32(1)
    return dataclasses.replace(
        metadata,
        last_used=metadata.last_used.at[row].set(stamp, mode="drop"),
        num_uses=metadata.num_uses.at[row].add(jnp.uint32(1), mode="drop"),
    )


def _add_all(metadata: Metadata, increments: jax.Array) -> Metadata:
    """Add u32[counters] to the counters, carrying into the high words."""
    old = metadata.counters
    low = old[:, 0] + increments
    high = old[:, 1] + (low < old[:, 0]).astype(jnp.uint32)
    return dataclasses.replace(metadata, counters=jnp.stack([low, high], axis=1))
