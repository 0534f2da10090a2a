"""The FIFO of free ids: take from the head, give back at the tail, in batches.

A batch of ids is described by ranks (0 for the first to leave or enter), which callers
get from a `running_sum`; one gather or one scatter then moves the whole batch. Cost
depends on the batch, never on the length of the ring.
"""

import jax
import jax.numpy as jnp

from jkv.metadata.xla_cpu import running_sum
from jkv.state import Ring


def peek(ring: Ring, ranks: jax.Array) -> jax.Array:
    """Return the ids that leave at these ranks; the ring is unchanged.

    Args:
      ring: the ring, of C ids.
      ranks: i32[...], 0 for the head; the caller masks ranks outside the count.
    """
    return ring.ids.at[wrap(ring, ring.head + ranks)].get(mode="clip")


def pop(ring: Ring, num: jax.Array) -> Ring:
    """Drop `num` ids (i32[], at most the count) from the head, none of them a hole."""
    count = ring.count - num
    return Ring.of(
        ring.ids,
        head=wrap(ring, ring.head + num),
        span=ring.span - num,
        count=count,
        fewest=jnp.minimum(ring.fewest, count),
    )


def push(ring: Ring, ids: jax.Array, entering: jax.Array) -> Ring:
    """Put ids at the tail, in the order they stand.

    Args:
      ring: the ring.
      ids: i32[P], ids that are not in the ring.
      entering: bool[P], which of them enter.
    """
    return enter(ring, ids, *places(ring, entering))


def enter(ring: Ring, ids: jax.Array, index: jax.Array, num: jax.Array) -> Ring:
    """Put ids, i32[P], at the `places` found for them, i32[P]; i32[] of them enter."""
    return Ring.of(
        ring.ids.at[index].set(ids, mode="drop", unique_indices=True),
        head=ring.head,
        span=ring.span + num,
        count=ring.count + num,
        fewest=ring.fewest,
    )


def places(ring: Ring, entering: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return where a `push` puts each id, i32[P], and how many enter, i32[].

    An id that stays out gets an index of its own past the end: a scatter drops it.
    """
    size = entering.shape[0]
    ranks = running_sum(entering.astype(jnp.int32))
    past_end = ring.ids.shape[0] + jnp.arange(size, dtype=jnp.int32)
    tail = wrap(ring, ring.head + ring.span)
    index = jnp.where(entering, wrap(ring, tail + ranks - 1), past_end)
    return index, ranks[-1] if size else jnp.int32(0)


def wrap(ring: Ring, index: jax.Array) -> jax.Array:
    """Bring an index below 2C back into the ring without a division."""
    capacity = ring.ids.shape[0]
    return jnp.where(index >= capacity, index - capacity, index)
