"""The free ids in LRU order: take from the head, return at the tail, in batches.

Ranks describe a batch of ids (0 leaves or enters first), computed by `running_sum`; one
gather or scatter moves the batch. The cost depends on the batch, never on the length of
the ring.

A prefix cache hit removes a free block from the middle of the ring, which leaves a
hole; `Ring.indices` distinguishes entries from holes. `take` passes the holes in front
of the ids that leave, each once, and `tidy` bounds the number of holes, so the
amortized cost per id is constant. Without a prefix index there are no holes and no code
for them.

With several classes (retention priorities) each has its own ring. Ids of class 0 leave
first; if there are too few, the first of the next class are appended. The functions of
one ring follow at the end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jkv.operations import gather, running_sum, scatter, scatter_max, while_loop
from jkv.state import Kept, Ring

Carry = TypeVar("Carry")

# Entries read per trip of a loop.
CHUNK = 512


class Keep(NamedTuple):
    """Retention of ids."""

    classes: Any  # i32[P]
    until: Any  # u32[P], ticks of the clock


def peek(ring: Ring, ranks: jax.Array) -> jax.Array:
    """Return the ids at distances `ranks` from the head, i32[...], holes included."""
    return gather(ring.ids, _wrap(ring, ring.head + ranks))


def pop(ring: Ring, num: jax.Array) -> Ring:
    """Drop `num` ids (i32[], at most the count) from the head; there are no holes."""
    fewest = ring.count - num
    return ring.added(num, head=1, span=-1, count=-1, taken=1, fewest=fewest)


def push(ring: Ring, ids: jax.Array, entering: jax.Array) -> Ring:
    """Append ids, i32[P], where bool[P]; none is in the ring."""
    if ring.kept is None:
        return _append(ring, ids, entering)
    return _push_by_class(ring, ring.kept, ids, entering)


def _push_by_class(ring: Ring, kept: Kept, ids: jax.Array, entering: jax.Array) -> Ring:
    """Append each id to the ring of its class."""
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


def take(ring: Ring, num: jax.Array, most: int) -> tuple[Ring, "Leaving"]:
    """Take `num` ids, i32[], from the head; at most the count, and at most `most`."""
    if ring.indices is None:
        return pop(ring, num), Leaving(ring, None)
    return _take_among_holes(ring, num, most)


class Leaving(NamedTuple):
    """Ids taken from a ring."""

    before: Ring  # without holes: the ring that they left
    ids: jax.Array | None  # i32[most], with holes: the ids by rank

    def peek(self, ranks: jax.Array) -> jax.Array:
        """Return the ids of these ranks, i32[...]."""
        if self.ids is None:
            return peek(self.before, ranks)
        return gather(self.ids, ranks)


def _take_among_holes(ring: Ring, num: jax.Array, most: int) -> tuple[Ring, Leaving]:
    """Take ids of a ring with holes, as `take`."""
    ring = _supply(ring, num)
    lowest = ring.by_class[0]
    taken, passed = _find_front(lowest, num, most)
    fewest = ring.count - num
    lowest = lowest.added(passed, head=1, span=-1)
    lowest = lowest.added(num, count=-1, taken=1, fewest=fewest)
    return dataclasses.replace(lowest, kept=ring.kept), Leaving(ring, taken)


def tidy(ring: Ring) -> Ring:
    """Remove all holes of each class if there are more of them than ids.

    The ring has room for as many holes as ids: `tidy` follows each removal, before the
    removed ids return.
    """
    return ring.joined([_tidy_one(each) for each in ring.by_class])


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
    """Remove distinct ids, i32[P], where bool[P], from any place; `tidy` follows."""
    num = jnp.sum(leaving, dtype=jnp.int32)
    ring = ring.added(num, taken=1, fewest=ring.count - num)
    return _change_each(ring, _take_out, ids, leaving)


def exchange(
    ring: Ring, out: jax.Array, leaving: jax.Array, ids: jax.Array, entering: jax.Array
) -> Ring:
    """Remove ids `out`, i32[P], where bool[P], then append `ids`, as above; tidy."""
    if ring.kept is not None or ring.indices is None:
        return push(tidy(remove(ring, out, leaving)), ids, entering)
    num = jnp.sum(leaving, dtype=jnp.int32)
    ring = ring.added(num, count=-1, taken=1, fewest=ring.count - num)
    return tidy(_append(ring, ids, entering, jnp.where(leaving, out, -1)))


def renew(
    ring: Ring, ids: jax.Array, leaving: jax.Array, keep: Keep | None = None
) -> Ring:
    """Move ids, i32[P], where bool[P], to the tail in this order; raise classes."""
    moved = raise_classes(remove(ring, ids, leaving), ids, keep)
    return push(tidy(moved), ids, leaving).with_account_of(ring)


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
    return push(tidy(out), ids, moves).with_account_of(ring)


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


def _append(
    ring: Ring, ids: jax.Array, entering: jax.Array, out: jax.Array | None = None
) -> Ring:
    """Append ids, i32[P], where bool[P]; leave holes at ids `out`, i32[P], or -1."""
    size = entering.shape[0]
    ranks = running_sum(entering.astype(jnp.int32))
    num = ranks[-1] if size else jnp.int32(0)
    # Distinct indices past the end for the others: a scatter drops them.
    past_end = ring.ids.shape[0] + jnp.arange(size, dtype=jnp.int32)
    tail = _wrap(ring, ring.head + ring.span)
    index = jnp.where(entering, _wrap(ring, tail + ranks - 1), past_end)
    indices = None
    if ring.indices is not None:
        row, value = jnp.where(entering, ids, ring.indices.shape[0]), index
        if out is not None:
            row = jnp.concatenate([row, out])
            value = jnp.concatenate([value, jnp.full_like(out, -1)])
        indices = scatter(ring.indices, row, value)
    ring = ring.changed(ids=scatter(ring.ids, index, ids, unique=True), indices=indices)
    return ring.added(num, span=1, count=1)


def _take_out(ring: Ring, ids: jax.Array, leaving: jax.Array) -> Ring:
    """Remove ids, i32[P], where bool[P], from any place in the ring."""
    indices = _indices_of(ring)
    gone = jnp.where(leaving, ids, indices.shape[0])
    ring = ring.changed(indices=scatter(indices, gone, -1))
    return ring.added(jnp.sum(leaving, dtype=jnp.int32), count=-1)


def _find_front(ring: Ring, num: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Return the first `num` ids, i32[most], and their distance with holes, i32[]."""
    is_dense = ring.span == ring.count
    front = peek(ring, jnp.arange(most, dtype=jnp.int32))
    lane = jnp.arange(CHUNK, dtype=jnp.int32)

    def trip(
        state: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        front, distance, num_found = state
        ids, entry = _entries_of_one(ring, distance + lane)
        rank = running_sum(entry.astype(jnp.int32)) + num_found
        found = jnp.where(entry & (rank <= num), rank - 1, most)
        passed = jnp.sum(rank <= num, dtype=jnp.int32)
        num_found = jnp.minimum(rank[-1], num)
        return scatter(front, found, ids), distance + passed, num_found

    passed = jnp.where(is_dense, num, 0)
    front, distance, _ = while_loop(
        lambda state: state[2] < num, trip, (front, passed, passed)
    )
    return front, jnp.minimum(distance, ring.span)


def _tidy_one(ring: Ring) -> Ring:
    """Remove all holes if there are more of them than ids; entries move to the tail."""
    if ring.indices is None:
        return ring
    is_full = ring.span - ring.count > ring.indices.shape[0]
    lane = jnp.arange(CHUNK, dtype=jnp.int32)

    def trip(state: tuple[Ring, jax.Array]) -> tuple[Ring, jax.Array]:
        ring, left = state
        passed = jnp.minimum(left, CHUNK)
        ids, entry = _entries_of_one(ring, lane)
        entry &= lane < passed
        moved = _append(ring.added(passed, head=1, span=-1), ids, entry)
        # They were counted already.
        return moved.added(moved.count - ring.count, count=-1), left - passed

    left = jnp.where(is_full, ring.span, 0)
    return while_loop(lambda state: state[1] > 0, trip, (ring, left))[0]


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
