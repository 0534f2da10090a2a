"""The free ids in LRU order: take from the head, return at the tail, in batches.

Ranks describe a batch of ids (0 leaves or enters first), computed by `running_sum`; one
gather or scatter moves the batch. The cost depends on the batch, never on the length of
the ring.

A prefix cache hit removes a free block from the middle of the ring, which leaves a
hole; `Ring.indices` distinguishes entries from holes. `expose` compacts the entries in
front before ids are taken. Each hole is passed once, so the amortized cost per id is
constant. Without a prefix index there are no holes and no code for them.

With several classes (retention priorities) each has its own ring. Ids of class 0 leave
first; if there are too few, the first of the next class are appended.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jkv.indexing import gather, scatter, scatter_max
from jkv.metadata import fifo
from jkv.metadata.xla_cpu import running_sum
from jkv.sharding.loops import while_loop
from jkv.state import Kept, Ring

Carry = TypeVar("Carry")


class Keep(NamedTuple):
    """Retention of ids."""

    classes: Any  # i32[P]
    until: Any  # u32[P], ticks of the clock


def peek(ring: Ring, ranks: jax.Array) -> jax.Array:
    """Return the ids that leave at these ranks, i32[...]; the ring is exposed."""
    return gather(ring.ids, fifo.wrap(ring, ring.head + ranks))


def pop(ring: Ring, num: jax.Array) -> Ring:
    """Drop `num` ids (i32[], at most the count) from the head of an exposed ring."""
    left = ring.added(num, head=1, span=-1, count=-1, taken=1)
    return left.with_fewest(left.count)


def push(ring: Ring, ids: jax.Array, entering: jax.Array) -> Ring:
    """Append ids, i32[P], where bool[P]; none is in the ring."""
    kept = ring.kept
    if kept is None:
        return fifo.push(ring, ids, entering)
    rank = running_sum(entering.astype(jnp.int32)).astype(jnp.uint32)
    row = jnp.where(entering, ids, kept.classes.shape[0])
    pushed = _change_each(ring, fifo.push, ids, entering)
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
    exposed = fifo.squeeze(lowest, fifo.reach(lowest, num))
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
    indices = fifo.indices_of(ring)
    ids, entry = fifo.entries(ring, jnp.arange(fifo.CHUNK, dtype=jnp.int32))
    rank = running_sum(entry.astype(jnp.int32))
    goes = entry & (rank <= lacking)
    num = jnp.minimum(rank[-1], lacking)
    passed = jnp.sum(rank <= lacking, dtype=jnp.int32)
    passed = jnp.minimum(passed, ring.span)
    gone = jnp.where(goes, ids, indices.shape[0])
    ring = ring.changed(indices=scatter(indices, gone, -1)).added(num, count=-1)
    ring = ring.added(passed, head=1, span=-1)
    return fifo.push(lowest, ids, goes), ring, lacking - num


def remove(ring: Ring, ids: jax.Array, leaving: jax.Array) -> Ring:
    """Remove distinct ids, i32[P], where bool[P], from any place."""
    num = jnp.sum(leaving, dtype=jnp.int32)
    ring = ring.added(num, taken=1).with_fewest(ring.count - num)
    return _change_each(ring, fifo.remove, ids, leaving)


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
        is_free |= gather(fifo.indices_of(each), ids, fill=-1) >= 0
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
    return fifo.collect(ids, is_entry, num_ids)


def refill(ring: Ring, ids: jax.Array, num: jax.Array, kept: Kept | None) -> Ring:
    """Return a ring of other ids from its first index on, with the old counters.

    The ids are i32[N'] in eviction order, `num` of them valid; `kept` has their
    classes.
    """
    if kept is None:
        return fifo.refill(ring, ids, num)
    ring = dataclasses.replace(ring, kept=kept)
    of = gather(kept.classes, ids, fill=-1)
    return ring.joined(
        [
            fifo.refill(each, *fifo.collect(ids, of == number, ids.shape[0]))
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
    lanes = jnp.arange(fifo.CHUNK, dtype=jnp.int32)

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
    ids, is_entry = fifo.entries(lowest, index)
    start = lowest.span
    for each in higher:
        more, is_more = fifo.entries(each, index - start)
        ids, is_entry = jnp.where(is_more, more, ids), is_entry | is_more
        start = start + each.span
    return ids, is_entry
