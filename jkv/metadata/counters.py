"""Counters and the logical clock: totals since `init`, in 64 bits.

JAX has no 64-bit integers by default, so a counter is two 32-bit words. The clock is a
counter: each call that serves a request increments it, and its low word stamps the
opening and the last use of a sequence. Each ring counts the ids that leave it
(`jkv.state.rings`).
"""

import jax
import jax.numpy as jnp

from jkv.indexing import scatter, scatter_add
from jkv.metadata import mentions
from jkv.metadata.xla_cpu import stage
from jkv.state import Metadata, SequenceRow
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
    """Count requests by status, i32[B], and tick if any was served, bool[B]."""
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
    """Return the occurrences of each counter in `row`, i32[B], as i32[counters]."""
    if row.shape[0] <= mentions.MOST_COMPARED:
        kind = jnp.arange(NUM_COUNTERS, dtype=jnp.int32)
        return jnp.sum(row[:, None] == kind[None], axis=0, dtype=jnp.int32)
    return scatter_add(jnp.zeros((NUM_COUNTERS,), jnp.int32), row, 1)


def mark_used(
    metadata: Metadata,
    row: jax.Array,
    before: SequenceRow,
    context_lengths: jax.Array | None = None,
) -> Metadata:
    """Stamp distinct rows, i32[B], as used by this call; a row of S is dropped.

    Args:
      metadata: the metadata.
      row: i32[B].
      before: the current values of these rows.
      context_lengths: i32[B], new lengths; None leaves them.
    """
    if context_lengths is not None:
        before = before._replace(context_length=context_lengths)
    stamp = metadata.sequences.next_stamp
    used = before._replace(last_used=stamp, num_uses=before.num_uses + 1)
    return metadata.with_rows(row, used)


def mark_parents(metadata: Metadata, row: jax.Array) -> Metadata:
    """Stamp rows, i32[B], as used by this call, counting each mention."""
    sequences = metadata.sequences
    last_used, num_uses = (
        jnp.full(row.shape, SequenceRow._fields.index(name), jnp.int32)
        for name in ("last_used", "num_uses")
    )
    rows = scatter(sequences.rows, (row, last_used), sequences.next_stamp)
    rows = scatter_add(rows, (row, num_uses), 1)
    return metadata.with_sequences(rows=rows)


def _add_all(old: jax.Array, increments: jax.Array) -> jax.Array:
    """Add u32[counters] to the counters, carrying into the high words."""
    carries = (old[:, 0] + increments < old[:, 0]).astype(jnp.uint32)
    return old + jnp.stack([increments, carries], axis=1)
