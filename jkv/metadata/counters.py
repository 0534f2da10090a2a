"""Counters and the logical clock: what happened since `init`, in 64 bits.

JAX has no 64-bit integers by default, so a counter is two 32-bit words. The clock is a
counter too: it goes on by one with each call that serves a request, and its low word is
the stamp that says when a sequence was opened and last used. What left the pools each
ring counts for itself (`jkv.state.rings`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.indexing import scatter, scatter_add
from jkv.metadata import mentions
from jkv.metadata.xla_cpu import stage
from jkv.state import Metadata, Sequences
from jkv.status import NUM_COUNTERS, Counter, Status


def add(metadata: Metadata, increments: dict[Counter, jax.Array]) -> Metadata:
    """Add to some counters, each increment i32[] or u32[], at least 0."""
    kind = jnp.arange(NUM_COUNTERS, dtype=jnp.int32)
    rows = jnp.zeros((NUM_COUNTERS,), jnp.uint32)
    for counter, increment in increments.items():
        rows = jnp.where(kind == counter, increment.astype(jnp.uint32), rows)
    counts = _add_all(metadata.sequences.counters, rows)
    return metadata.with_sequences(counters=counts)


def settle(metadata: Metadata, status: jax.Array, served: jax.Array) -> Metadata:
    """Count what became of requests, i32[B]; tick if any was served, bool[B]."""
    counts = _settle(metadata.sequences.counters, status, served)
    return metadata.with_sequences(counters=counts)


@stage
def _settle(old: jax.Array, status: jax.Array, served: jax.Array) -> jax.Array:
    # Each request adds one to its row.
    row = jnp.where(served, jnp.int32(Counter.CLOCK), status)
    row = jnp.where(served | (status != Status.OK), row, NUM_COUNTERS)
    counts = _count(row)
    kind = jnp.arange(NUM_COUNTERS, dtype=jnp.int32)
    counts = jnp.where(kind == Counter.CLOCK, jnp.minimum(counts, 1), counts)
    return _add_all(old, counts.astype(jnp.uint32))


def _count(row: jax.Array) -> jax.Array:
    """Return how often each counter is among rows, i32[B], as i32[counters]."""
    if row.shape[0] <= mentions.MOST_COMPARED:
        kind = jnp.arange(NUM_COUNTERS, dtype=jnp.int32)
        return jnp.sum(row[:, None] == kind[None], axis=0, dtype=jnp.int32)
    return scatter_add(jnp.zeros((NUM_COUNTERS,), jnp.int32), row, 1)


def mark_opened(metadata: Metadata, row: jax.Array) -> Metadata:
    """Stamp rows, i32[B], as opened by the next tick; one of S or above is dropped."""
    sequences, stamp = metadata.sequences, metadata.now + jnp.uint32(1)
    return metadata.with_sequences(
        created=scatter(sequences.created, row, stamp),
        last_used=scatter(sequences.last_used, row, stamp),
        num_uses=scatter(sequences.num_uses, row, jnp.uint32(0)),
    )


def mark_used(metadata: Metadata, row: jax.Array) -> Metadata:
    """Stamp rows, i32[B], as used by the next tick; one of S or above is dropped."""
    return dataclasses.replace(metadata, sequences=_mark_used(metadata.sequences, row))


@stage
def _mark_used(sequences: Sequences, row: jax.Array) -> Sequences:
    stamp = sequences.now + jnp.uint32(1)
    return dataclasses.replace(
        sequences,
        last_used=scatter(sequences.last_used, row, stamp),
        num_uses=scatter_add(sequences.num_uses, row, jnp.uint32(1)),
    )


def _add_all(old: jax.Array, increments: jax.Array) -> jax.Array:
    """Add u32[counters] to the counters, carrying into the high words."""
    low = old[:, 0] + increments
    high = old[:, 1] + (low < old[:, 0]).astype(jnp.uint32)
    return jnp.stack([low, high], axis=1)
