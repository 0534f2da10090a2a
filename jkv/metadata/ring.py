"""The free ids in LRU order: take from the head, return at the tail, in batches.

Ranks describe a batch of ids (0 leaves or enters first), computed by `running_sum`; one
gather or scatter moves the batch. The cost depends on the batch, never on the length of
the ring.

A prefix cache hit removes a free block from the middle of the ring, which leaves a
hole; `Ring.indices` distinguishes entries from holes. `expose` compacts the entries in
front before ids are taken. Each hole is passed once, so the amortized cost per id is
constant. Without a prefix index there are no holes and no code for them.

With several classes (retention priorities) each has its own ring. Ids of class 0 leave
first; if there are too few, the first of the next class are appended. The functions of
one ring follow at the end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jkv.indexing import gather, scatter, scatter_max
from jkv.metadata.xla_cpu import running_sum, stage
from jkv.sharding.loops import while_loop
from jkv.state import Kept, Ring

Carry = TypeVar("Carry")

# Entries read per trip of a loop.
CHUNK = 512


class Keep(NamedTuple):
    """Retention of ids."""

    classes: Any  # i32[P]
    until: Any  # u32[P], ticks of the clock


def peek(ring: Ring, ranks: jax.Array) -> jax.Array:
    """Return the ids that leave at these ranks, i32[...]; the ring is exposed."""
    return gather(ring.ids, _wrap(ring, ring.head + ranks))


def pop(ring: Ring, num: jax.Array) -> Ring:
    """Drop `num` ids (i32[], at most the count) from the head of an exposed ring."""
    left = ring.added(num, head=1, span=-1, count=-1, taken=1)
    return left.with_fewest(left.count)


def push(ring: Ring, ids: jax.Array, entering: jax.Array) -> Ring:
    """Append ids, i32[P], where bool[P]; none is in the ring."""
    kept = ring.kept
    if kept is None:
        return _append(ring, ids, entering)
    rank = running_sum(entering.astype(jnp.int32)).astype(jnp.uint32)
    row = jnp.where(entering, ids, kept.classes.shape[0])
    pushed = _change_each(ring, _append, ids, entering)
    return pushed.joined(
        pushed.by_class,
        entered=scatter(kept.entered, row, kept.num_entered + rank),
        num_entered=kept.num_entered + jnp.sum(entering, dtype=jnp.uint32),
    )


def _change_each(
    ring: Ring,
    change: Callable[[Ring, jax.Array, jax.Array], Ring],
    ids: jax.Array,
    chosen: jax.Array,
) -> Ring:
    """Apply `change` to the ring of each class with its chosen ids, i32[P]."""
    if ring.kept is None:
        return change(ring, ids, chosen)
    of = gather(ring.kept.classes, ids)
    return ring.joined(
        [
            change(each, ids, chosen & (of == number))
            for number, each in enumerate(ring.by_class)
        ]
    )


def expose(ring: Ring, num: jax.Array) -> Ring:
    """Move holes out of the first `num` entries, i32[]."""
    if ring.indices is None:
        return ring
    ring = _supply(ring, num)
    lowest = ring.by_class[0]
    # No hole in the whole ring: nothing to look for.
    num = jnp.where(lowest.span == lowest.count, 0, num)
    exposed = _squeeze(lowest, _reach(lowest, num))
    return dataclasses.replace(exposed, kept=ring.kept)


def _supply(ring: Ring, num: jax.Array) -> Ring:
    """Append ids of higher classes to class 0 until `num` ids can leave."""
    lowest, *higher = ring.by_class
    for number, each in enumerate(higher):
        lacking = jnp.clip(num - lowest.count, 0, each.count)
        lowest, higher[number], _ = while_loop(
            lambda carry: carry[2] > 0,
            lambda carry: _supply_chunk(*carry),
            (lowest, each, lacking),
        )
    return ring.joined([lowest, *higher])


def _supply_chunk(
    lowest: Ring, ring: Ring, lacking: jax.Array
) -> tuple[Ring, Ring, jax.Array]:
    """Append the entries of one chunk to class 0, at most `lacking`."""
    indices = _indices_of(ring)
    ids, entry = _entries_of_one(ring, jnp.arange(CHUNK, dtype=jnp.int32))
    rank = running_sum(entry.astype(jnp.int32))
    goes = entry & (rank <= lacking)
    num = jnp.minimum(rank[-1], lacking)
    passed = jnp.sum(rank <= lacking, dtype=jnp.int32)
    passed = jnp.minimum(passed, ring.span)
    gone = jnp.where(goes, ids, indices.shape[0])
    ring = ring.changed(indices=scatter(indices, gone, -1)).added(num, count=-1)
    ring = ring.added(passed, head=1, span=-1)
    return _append(lowest, ids, goes), ring, lacking - num


def remove(ring: Ring, ids: jax.Array, leaving: jax.Array) -> Ring:
    """Remove distinct ids, i32[P], where bool[P], from any place."""
    num = jnp.sum(leaving, dtype=jnp.int32)
    ring = ring.added(num, taken=1).with_fewest(ring.count - num)
    return _change_each(ring, _take_out, ids, leaving)


def renew(
    ring: Ring, ids: jax.Array, leaving: jax.Array, keep: Keep | None = None
) -> Ring:
    """Move ids, i32[P], where bool[P], to the tail in this order; raise classes."""
    moved = raise_classes(remove(ring, ids, leaving), ids, keep)
    return push(moved, ids, leaving).with_account_of(ring)


def raise_classes(ring: Ring, ids: jax.Array, keep: Keep | None) -> Ring:
    """Raise the classes and times of ids, i32[P], that are not free."""
    kept = ring.kept
    if kept is None or keep is None:
        return ring
    return ring.joined(
        ring.by_class,
        classes=scatter_max(kept.classes, ids, keep.classes),
        kept_until=scatter_max(kept.kept_until, ids, keep.until),
    )


def forget(ring: Ring, ids: jax.Array, num_forgotten: jax.Array) -> Ring:
    """Clear the records of taken ids, i32[P], and count the evicted ones."""
    if ring.indices is None:
        return ring
    indices = scatter(ring.indices, ids, -1)
    ring = ring.changed(indices=indices).added(num_forgotten, forgotten=1)
    return _reset(ring, ids)


def _reset(ring: Ring, ids: jax.Array) -> Ring:
    """Reset ids, i32[P], to class 0; none is in the ring of another class."""
    kept = ring.kept
    if kept is None:
        return ring
    return ring.joined(
        ring.by_class,
        classes=scatter(kept.classes, ids, 0),
        kept_until=scatter(kept.kept_until, ids, jnp.uint32(0)),
    )


def lower(ring: Ring, ids: jax.Array) -> Ring:
    """Move distinct ids, i32[P], to class 0, free ones to its tail; N is dropped."""
    kept = ring.kept
    if kept is None:
        return ring
    is_free = jnp.zeros(ids.shape, bool)
    for each in ring.by_class:
        is_free |= gather(_indices_of(each), ids, fill=-1) >= 0
    moves = is_free & (gather(kept.classes, ids) > 0)
    out = _reset(remove(ring, ids, moves), ids)
    return push(out, ids, moves).with_account_of(ring)


def arrange(ring: Ring, stays: jax.Array) -> Ring:
    """Move ids outside `stays`, bool[N], to class 0, in the order of entering."""
    kept = ring.kept
    if kept is None:
        return ring
    kept = dataclasses.replace(
        kept,
        classes=jnp.where(stays, kept.classes, 0),
        kept_until=jnp.where(stays, kept.kept_until, jnp.uint32(0)),
    )
    ids, num = in_order(ring)
    nothing = len(ring.by_class)
    entered = gather(kept.entered, ids)
    *_, ids = jax.lax.sort(
        (
            gather(kept.classes, ids, fill=nothing),
            entered - kept.num_entered - 1,  # the oldest has the smallest bits
            ids,
        ),
        num_keys=2,
    )
    return refill(ring, ids, num, kept)


def in_order(ring: Ring) -> tuple[jax.Array, jax.Array]:
    """Return the ids in eviction order, i32[N], padded with N, and their number."""
    capacity = sum(each.ids.shape[0] for each in ring.by_class)
    num_ids = ring.ids.shape[0] if ring.indices is None else ring.indices.shape[0]
    ids, is_entry = entries(ring, jnp.arange(capacity, dtype=jnp.int32))
    return _collect(ids, is_entry, num_ids)


def refill(ring: Ring, ids: jax.Array, num: jax.Array, kept: Kept | None) -> Ring:
    """Return a ring of other ids from its first index on, with the old counters.

    The ids are i32[N'] in eviction order, `num` of them valid; `kept` has their
    classes.
    """
    if kept is None:
        return _refill_one(ring, ids, num)
    ring = dataclasses.replace(ring, kept=kept)
    of = gather(kept.classes, ids, fill=-1)
    return ring.joined(
        [
            _refill_one(each, *_collect(ids, of == number, ids.shape[0]))
            for number, each in enumerate(ring.by_class)
        ]
    )


def scan(
    ring: Ring,
    goes_on: Callable[[Carry], jax.Array],
    visit: Callable[[Carry, jax.Array, jax.Array], Carry],
    carry: Carry,
) -> Carry:
    """Visit entries from the head in chunks, while `goes_on(carry)`.

    `visit(carry, ids, is_entry)` gets i32[P] and bool[P] in eviction order. The
    distance of the entries from the head is known only at run time.
    """
    lanes = jnp.arange(CHUNK, dtype=jnp.int32)

    def trip(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        start, carry = state
        carry = visit(carry, *entries(ring, start + lanes))
        return start + lanes.shape[0], carry

    return while_loop(
        lambda state: (state[0] < ring.span) & goes_on(state[1]),
        trip,
        (jnp.int32(0), carry),
    )[1]


def entries(ring: Ring, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ids at distances from the head, i32[P], and a mask of entries."""
    if ring.indices is None:
        return peek(ring, index), index < ring.span
    lowest, *higher = ring.by_class
    ids, is_entry = _entries_of_one(lowest, index)
    start = lowest.span
    for each in higher:
        more, is_more = _entries_of_one(each, index - start)
        ids, is_entry = jnp.where(is_more, more, ids), is_entry | is_more
        start = start + each.span
    return ids, is_entry


# The ring of one class: a FIFO with holes and spare room.


def _wrap(ring: Ring, index: jax.Array) -> jax.Array:
    """Wrap an index below 2C into the ring without a division."""
    capacity = ring.ids.shape[0]
    return jnp.where(index >= capacity, index - capacity, index)


def _append(ring: Ring, ids: jax.Array, entering: jax.Array) -> Ring:
    """Append the ids, i32[P], where bool[P]."""
    size = entering.shape[0]
    ranks = running_sum(entering.astype(jnp.int32))
    num = ranks[-1] if size else jnp.int32(0)
    # Distinct indices past the end for the others: a scatter drops them.
    past_end = ring.ids.shape[0] + jnp.arange(size, dtype=jnp.int32)
    tail = _wrap(ring, ring.head + ring.span)
    index = jnp.where(entering, _wrap(ring, tail + ranks - 1), past_end)
    indices = None
    if ring.indices is not None:
        row = jnp.where(entering, ids, ring.indices.shape[0])
        indices = scatter(ring.indices, row, index)
    ring = ring.changed(ids=scatter(ring.ids, index, ids, unique=True), indices=indices)
    return ring.added(num, span=1, count=1)


def _take_out(ring: Ring, ids: jax.Array, leaving: jax.Array) -> Ring:
    """Remove ids, i32[P], where bool[P], from any place in the ring."""
    indices = _indices_of(ring)
    num_ids = indices.shape[0]
    gone = jnp.where(leaving, ids, num_ids)
    indices = scatter(indices, gone, -1)
    num = jnp.sum(leaving, dtype=jnp.int32)
    ring = ring.changed(indices=indices).added(num, count=-1)
    # The ring has room for as many holes as ids; squeeze when there are more.
    full = ring.span - ring.count > num_ids
    return _squeeze(ring, _reach(ring, jnp.where(full, ring.count, 0)))


def _entries_of_one(ring: Ring, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ids at distances from the head, i32[P], and a mask of entries, bool[P]."""
    indices = _indices_of(ring)
    stored_at = _wrap(ring, ring.head + index)
    ids = gather(ring.ids, stored_at)
    inside = (index >= 0) & (index < ring.span)
    return ids, inside & (gather(indices, ids) == stored_at)


def _indices_of(ring: Ring) -> jax.Array:
    """Return the index of each id, i32[N], of a ring with holes."""
    assert ring.indices is not None, "ids leave the middle of rings with indices only"
    return ring.indices


def _refill_one(ring: Ring, ids: jax.Array, num: jax.Array) -> Ring:
    """Return a ring of other ids, i32[N'], from index 0 on; N' pads them."""
    size, indices, room = ids.shape[0], None, 0
    if ring.indices is not None:
        room = size  # for holes
        index = jnp.arange(size, dtype=jnp.int32)
        indices = scatter(jnp.full((size,), -1, jnp.int32), ids, index)
    ids = jnp.pad(ids, (0, room), constant_values=size)
    ring = ring.changed(ids=ids, indices=indices)
    return ring.with_numbers(head=jnp.int32(0), span=num, count=num)


def _collect(
    ids: jax.Array, chosen: jax.Array, num_ids: int
) -> tuple[jax.Array, jax.Array]:
    """Return the chosen ids, i32[N], padded with N, and their number."""
    ranks = running_sum(chosen.astype(jnp.int32))
    index = jnp.where(chosen, ranks - 1, num_ids)
    gathered = jnp.full((num_ids,), num_ids, jnp.int32)
    return scatter(gathered, index, ids), ranks[-1]


def _reach(ring: Ring, num: jax.Array) -> jax.Array:
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
    more = jnp.sum(_entries_of_one(ring, end + lanes)[1], dtype=jnp.int32)
    return jnp.minimum(end + CHUNK, ring.span), found + more


def _squeeze(ring: Ring, end: jax.Array) -> Ring:
    """Compact the entries before `end` towards it, and advance the head."""
    # From the end towards the head: an entry moves only to indices already read.
    ids, indices, _, start = while_loop(
        lambda state: state[2] > 0,
        lambda state: _squeeze_chunk(ring.bounds, *state),
        (ring.ids, _indices_of(ring), end, end),
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
    found, entry = _entries_of_one(ring, index)
    rank = running_sum(entry.astype(jnp.int32))
    target = _wrap(ring, ring.head + write_to - rank[-1] + rank - 1)
    moved = jnp.where(entry, found, indices.shape[0])
    return (
        scatter(ids, jnp.where(entry, target, ids.shape[0]), found),
        scatter(indices, moved, target),
        read_to - CHUNK,
        write_to - rank[-1],
    )
