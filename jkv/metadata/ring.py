"""The FIFO of free ids: take from the head, give back at the tail, in batches.

A batch of ids is described by ranks (0 for the first to leave or enter), which callers
get from a `running_sum`; one gather or one scatter then moves the whole batch. Cost
depends on the batch, never on the length of the ring.

A free block that the prefix index finds leaves the middle of the ring, where a hole
remains; `Ring.indices` tells an entry from a hole. Before ids are taken, the entries in
front are moved together (`expose`). Each hole is moved past once, so the work stays
constant per id in the long run. A ring without them has no holes, and nothing of this
is traced for it.
"""

import jax
import jax.numpy as jnp

from jkv.metadata.xla_cpu import running_sum, stage
from jkv.sharding.loops import while_loop
from jkv.state import Ring

# Entries looked at per trip of a loop.
_CHUNK = 512


def peek(ring: Ring, ranks: jax.Array) -> jax.Array:
    """Return the ids that leave at these ranks, i32[...]; the ring is unchanged.

    It has no hole among its first entries. The caller masks ranks outside the count.
    """
    return ring.ids.at[wrap(ring, ring.head + ranks)].get(mode="clip")


def pop(ring: Ring, num: jax.Array) -> Ring:
    """Drop `num` ids (i32[], at most the count) from the head, none of them a hole."""
    count = ring.count - num
    return ring.changed(
        head=wrap(ring, ring.head + num),
        span=ring.span - num,
        count=count,
        fewest=jnp.minimum(ring.fewest, count),
        taken=num,
    )


def push(ring: Ring, ids: jax.Array, entering: jax.Array) -> Ring:
    """Put ids that enter, i32[P] where bool[P], at the tail; none is in the ring."""
    size = entering.shape[0]
    ranks = running_sum(entering.astype(jnp.int32))
    num = ranks[-1] if size else jnp.int32(0)
    # An id that stays out gets an index of its own past the end: a scatter drops it.
    past_end = ring.ids.shape[0] + jnp.arange(size, dtype=jnp.int32)
    tail = wrap(ring, ring.head + ring.span)
    index = jnp.where(entering, wrap(ring, tail + ranks - 1), past_end)
    indices = None
    if ring.indices is not None:
        row = jnp.where(entering, ids, ring.indices.shape[0])
        indices = ring.indices.at[row].set(index, mode="drop")
    return ring.changed(
        ids=ring.ids.at[index].set(ids, mode="drop", unique_indices=True),
        indices=indices,
        span=ring.span + num,
        count=ring.count + num,
    )


def wrap(ring: Ring, index: jax.Array) -> jax.Array:
    """Bring an index below 2C back into the ring without a division."""
    capacity = ring.ids.shape[0]
    return jnp.where(index >= capacity, index - capacity, index)


def expose(ring: Ring, num: jax.Array) -> Ring:
    """Rid the first `num` ids, i32[], of holes between them."""
    if ring.indices is None:
        return ring
    # No hole in the whole ring: nothing to look for.
    num = jnp.where(ring.span == ring.count, 0, num)
    return _squeeze(ring, ring.indices, _reach(ring, ring.indices, num))


def remove(ring: Ring, ids: jax.Array, leaving: jax.Array) -> Ring:
    """Let ids leave from wherever they stand, i32[P], all different where bool[P].

    Holes remain, so the ring is one with indices.
    """
    assert ring.indices is not None, "ids leave the middle of rings with indices only"
    num_ids = ring.indices.shape[0]
    num = jnp.sum(leaving, dtype=jnp.int32)
    count = ring.count - num
    gone = jnp.where(leaving, ids, num_ids)
    indices = ring.indices.at[gone].set(-1, mode="drop")
    ring = ring.changed(
        indices=indices,
        count=count,
        fewest=jnp.minimum(ring.fewest, count),
        taken=num,
    )
    # The ring has room for as many holes as ids; more than that are squeezed out.
    full = ring.span - ring.count > num_ids
    return _squeeze(
        ring, indices, _reach(ring, indices, jnp.where(full, ring.count, 0))
    )


def renew(ring: Ring, ids: jax.Array, leaving: jax.Array) -> Ring:
    """Let ids go from wherever they stand to the tail, in the order they stand here.

    Arguments as for `remove`. Nothing is taken.
    """
    moved = push(remove(ring, ids, leaving), ids, leaving)
    return moved.with_account_of(ring)


def entries(ring: Ring, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the ids at distances from the head, i32[P].

    And bool[P]: which of them are entries, not holes and not past the tail.
    """
    if ring.indices is None:
        return peek(ring, index), index < ring.span
    return _entries(ring, ring.indices, index)


def _entries(
    ring: Ring, indices: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    stored_at = wrap(ring, ring.head + index)
    ids = ring.ids.at[stored_at].get(mode="clip")
    inside = (index >= 0) & (index < ring.span)
    return ids, inside & (indices.at[ids].get(mode="clip") == stored_at)


def _reach(ring: Ring, indices: jax.Array, num: jax.Array) -> jax.Array:
    """Return how far from the head `num` entries reach, in whole chunks, i32[]."""
    return while_loop(
        lambda state: (state[1] < num) & (state[0] < ring.span),
        lambda state: _count_chunk(ring, indices, *state),
        (jnp.int32(0), jnp.int32(0)),
    )[0]


@stage
def _count_chunk(
    ring: Ring, indices: jax.Array, end: jax.Array, found: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Count the entries of one chunk; return where it ends, and how many there are."""
    lanes = jnp.arange(_CHUNK, dtype=jnp.int32)
    more = jnp.sum(_entries(ring, indices, end + lanes)[1], dtype=jnp.int32)
    return jnp.minimum(end + _CHUNK, ring.span), found + more


def _squeeze(ring: Ring, indices: jax.Array, end: jax.Array) -> Ring:
    """Move the entries before `end` together, up to `end`; the head follows."""
    # From the end towards the head: an entry only moves to indices already read.
    ids, indices, _, start = while_loop(
        lambda state: state[2] > 0,
        lambda state: _squeeze_chunk(ring.bounds, *state),
        (ring.ids, indices, end, end),
    )
    return ring.changed(
        ids=ids,
        indices=indices,
        head=wrap(ring, ring.head + start),
        span=ring.span - start,
    )


@stage
def _squeeze_chunk(
    bounds: jax.Array,
    ids: jax.Array,
    indices: jax.Array,
    read_to: jax.Array,
    write_to: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Move the entries of the chunk that ends at `read_to`, up to `write_to`."""
    ring = Ring(ids=ids, bounds=bounds, indices=indices)
    index = read_to - _CHUNK + jnp.arange(_CHUNK, dtype=jnp.int32)
    found, entry = _entries(ring, indices, index)
    rank = running_sum(entry.astype(jnp.int32))
    target = wrap(ring, ring.head + write_to - rank[-1] + rank - 1)
    moved = jnp.where(entry, found, indices.shape[0])
    return (
        ids.at[jnp.where(entry, target, ids.shape[0])].set(found, mode="drop"),
        indices.at[moved].set(target, mode="drop"),
        read_to - _CHUNK,
        write_to - rank[-1],
    )
