"""The FIFO of free ids of one class, with holes and spare room.

`jkv.metadata.ring` is the interface; with several classes it has one FIFO for each.
"""

import jax
import jax.numpy as jnp

from jkv.indexing import gather, scatter
from jkv.metadata.xla_cpu import running_sum, stage
from jkv.sharding.loops import while_loop
from jkv.state import Ring

# Entries read per trip of a loop.
CHUNK = 512


def wrap(ring: Ring, index: jax.Array) -> jax.Array:
    """Wrap an index below 2C into the ring without a division."""
    capacity = ring.ids.shape[0]
    return jnp.where(index >= capacity, index - capacity, index)


def push(ring: Ring, ids: jax.Array, entering: jax.Array) -> Ring:
    """Append the ids, i32[P], where bool[P]."""
    size = entering.shape[0]
    ranks = running_sum(entering.astype(jnp.int32))
    num = ranks[-1] if size else jnp.int32(0)
    # Distinct indices past the end for the others: a scatter drops them.
    past_end = ring.ids.shape[0] + jnp.arange(size, dtype=jnp.int32)
    tail = wrap(ring, ring.head + ring.span)
    index = jnp.where(entering, wrap(ring, tail + ranks - 1), past_end)
    indices = None
    if ring.indices is not None:
        row = jnp.where(entering, ids, ring.indices.shape[0])
        indices = scatter(ring.indices, row, index)
    ring = ring.changed(ids=scatter(ring.ids, index, ids, unique=True), indices=indices)
    return ring.added(num, span=1, count=1)


def remove(ring: Ring, ids: jax.Array, leaving: jax.Array) -> Ring:
    """Remove ids, i32[P], where bool[P], from any place in the ring."""
    indices = indices_of(ring)
    num_ids = indices.shape[0]
    gone = jnp.where(leaving, ids, num_ids)
    indices = scatter(indices, gone, -1)
    num = jnp.sum(leaving, dtype=jnp.int32)
    ring = ring.changed(indices=indices).added(num, count=-1)
    # The ring has room for as many holes as ids; squeeze when there are more.
    full = ring.span - ring.count > num_ids
    return squeeze(ring, reach(ring, jnp.where(full, ring.count, 0)))


def entries(ring: Ring, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ids at distances from the head, i32[P], and a mask of entries, bool[P]."""
    indices = indices_of(ring)
    stored_at = wrap(ring, ring.head + index)
    ids = gather(ring.ids, stored_at)
    inside = (index >= 0) & (index < ring.span)
    return ids, inside & (gather(indices, ids) == stored_at)


def indices_of(ring: Ring) -> jax.Array:
    """Return the index of each id, i32[N], of a ring with holes."""
    assert ring.indices is not None, "ids leave the middle of rings with indices only"
    return ring.indices


def refill(ring: Ring, ids: jax.Array, num: jax.Array) -> Ring:
    """Return a ring of other ids, i32[N'], from index 0 on; N' pads them."""
    size, indices, room = ids.shape[0], None, 0
    if ring.indices is not None:
        room = size  # for holes
        index = jnp.arange(size, dtype=jnp.int32)
        indices = scatter(jnp.full((size,), -1, jnp.int32), ids, index)
    ids = jnp.pad(ids, (0, room), constant_values=size)
    ring = ring.changed(ids=ids, indices=indices)
    return ring.with_numbers(head=jnp.int32(0), span=num, count=num)


def collect(
    ids: jax.Array, chosen: jax.Array, num_ids: int
) -> tuple[jax.Array, jax.Array]:
    """Return the chosen ids, i32[N], padded with N, and their number."""
    ranks = running_sum(chosen.astype(jnp.int32))
    index = jnp.where(chosen, ranks - 1, num_ids)
    gathered = jnp.full((num_ids,), num_ids, jnp.int32)
    return scatter(gathered, index, ids), ranks[-1]


def reach(ring: Ring, num: jax.Array) -> jax.Array:
    """Return the distance from the head that covers `num` entries, in whole chunks."""
    return while_loop(
        lambda state: (state[1] < num) & (state[0] < ring.span),
        lambda state: _count_chunk(ring, *state),
        (jnp.int32(0), jnp.int32(0)),
    )[0]


@stage
def _count_chunk(
    ring: Ring, end: jax.Array, found: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Count the entries of one chunk; return its end and the total so far."""
    lanes = jnp.arange(CHUNK, dtype=jnp.int32)
    more = jnp.sum(entries(ring, end + lanes)[1], dtype=jnp.int32)
    return jnp.minimum(end + CHUNK, ring.span), found + more


def squeeze(ring: Ring, end: jax.Array) -> Ring:
    """Compact the entries before `end` towards it, and advance the head."""
    # From the end towards the head: an entry moves only to indices already read.
    ids, indices, _, start = while_loop(
        lambda state: state[2] > 0,
        lambda state: _squeeze_chunk(ring.bounds, *state),
        (ring.ids, indices_of(ring), end, end),
    )
    return ring.changed(ids=ids, indices=indices).added(start, head=1, span=-1)


@stage
def _squeeze_chunk(
    bounds: jax.Array,
    ids: jax.Array,
    indices: jax.Array,
    read_to: jax.Array,
    write_to: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compact the chunk that ends at `read_to` so that it ends at `write_to`."""
    ring = Ring(ids=ids, bounds=bounds, indices=indices)
    index = read_to - CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
    found, entry = entries(ring, index)
    rank = running_sum(entry.astype(jnp.int32))
    target = wrap(ring, ring.head + write_to - rank[-1] + rank - 1)
    moved = jnp.where(entry, found, indices.shape[0])
    return (
        scatter(ids, jnp.where(entry, target, ids.shape[0]), found),
        scatter(indices, moved, target),
        read_to - CHUNK,
        write_to - rank[-1],
    )
