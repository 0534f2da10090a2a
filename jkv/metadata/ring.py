"""The FIFO of free ids: take from the head, give back at the tail, in batches.

A batch of ids is described by ranks (0 for the first to leave or enter), which callers
get from a `running_sum`; one gather or one scatter then moves the whole batch. Cost
depends on the batch, never on the length of the ring.

A free block that the prefix index finds leaves the middle of the ring, where a hole
remains; `Ring.indices` tells an entry from a hole. Before ids are taken, the entries in
front are moved together (`expose`). Each hole is moved past once, so the work stays
constant per id in the long run. A ring without them has no holes, and nothing of this
is traced for it.

Ids of several classes have a ring each. Those of the lowest leave; where there are too
few of them, the first of the next follow behind the last.
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
    """How ids are kept."""

    classes: Any  # i32[P], those that there are
    until: Any  # u32[P], times


def peek(ring: Ring, ranks: jax.Array) -> jax.Array:
    """Return the ids that leave at these ranks, i32[...], none of them a hole."""
    return gather(ring.ids, fifo.wrap(ring, ring.head + ranks))


def pop(ring: Ring, num: jax.Array) -> Ring:
    """Drop `num` ids (i32[], at most the count) from the head, none of them a hole."""
    left = ring.added(num, head=1, span=-1, count=-1, taken=1)
    return left.with_fewest(left.count)


def push(ring: Ring, ids: jax.Array, entering: jax.Array) -> Ring:
    """Put ids that enter, i32[P] where bool[P], at the tail; none is in the ring."""
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
    """Change the ring of each class by those of its ids, i32[P], where bool[P]."""
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
    """Rid the first `num` ids, i32[], of holes between them."""
    if ring.indices is None:
        return ring
    ring = _supply(ring, num)
    lowest = ring.by_class[0]
    # No hole in the whole ring: nothing to look for.
    num = jnp.where(lowest.span == lowest.count, 0, num)
    exposed = fifo.squeeze(lowest, fifo.reach(lowest, num))
    return dataclasses.replace(exposed, kept=ring.kept)


def _supply(ring: Ring, num: jax.Array) -> Ring:
    """Let ids of higher classes follow those of the lowest, so that `num` leave."""
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
    """Let the ids of one chunk follow the lowest class, as far as they lack."""
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
    """Let different ids, i32[P], leave from wherever they stand, where bool[P]."""
    num = jnp.sum(leaving, dtype=jnp.int32)
    ring = ring.added(num, taken=1).with_fewest(ring.count - num)
    return _change_each(ring, fifo.remove, ids, leaving)


def renew(
    ring: Ring, ids: jax.Array, leaving: jax.Array, keep: Keep | None = None
) -> Ring:
    """Let ids go from wherever they stand to the tail, in this order, kept anew."""
    moved = raise_classes(remove(ring, ids, leaving), ids, keep)
    return push(moved, ids, leaving).with_account_of(ring)


def raise_classes(ring: Ring, ids: jax.Array, keep: Keep | None) -> Ring:
    """Give ids, i32[P], that are not free, at least these classes and times."""
    kept = ring.kept
    if kept is None or keep is None:
        return ring
    return ring.joined(
        ring.by_class,
        classes=scatter_max(kept.classes, ids, keep.classes),
        kept_until=scatter_max(kept.kept_until, ids, keep.until),
    )


def forget(ring: Ring, ids: jax.Array, num_forgotten: jax.Array) -> Ring:
    """Note that ids, i32[P], have left for good, and lost what they were known by."""
    if ring.indices is None:
        return ring
    indices = scatter(ring.indices, ids, -1)
    ring = ring.changed(indices=indices).added(num_forgotten, forgotten=1)
    return _reset(ring, ids)


def _reset(ring: Ring, ids: jax.Array) -> Ring:
    """Let ids, i32[P], be of class 0, which are not in the ring of another."""
    kept = ring.kept
    if kept is None:
        return ring
    return ring.joined(
        ring.by_class,
        classes=scatter(kept.classes, ids, 0),
        kept_until=scatter(kept.kept_until, ids, jnp.uint32(0)),
    )


def lower(ring: Ring, ids: jax.Array) -> Ring:
    """Let different ids, i32[P], be of class 0, free ones at its tail; N is dropped."""
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
    """Let ids of class 0 that do not stay, bool[N], stand in the order of entering."""
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
    """Return the ids as they leave, i32[N], N behind the last, and how many."""
    capacity = sum(each.ids.shape[0] for each in ring.by_class)
    num_ids = ring.ids.shape[0] if ring.indices is None else ring.indices.shape[0]
    ids, is_entry = entries(ring, jnp.arange(capacity, dtype=jnp.int32))
    return fifo.collect(ids, is_entry, num_ids)


def refill(ring: Ring, ids: jax.Array, num: jax.Array, kept: Kept | None) -> Ring:
    """Return a ring of other ids, from its first index on, with the old account.

    They are i32[N'], as they leave, N' behind the last of so many, i32[]; kept by
    classes, if there are.
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
    """Visit entries from the head on, some hundred at a time, while it goes on.

    `visit(carry, ids, is_entry)` gets ids as they leave, i32[P] and bool[P]. A loop, as
    how far the entries lie from the head shows only on the way.
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
    """Return ids at distances from the head, i32[P], and which of them are entries."""
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
