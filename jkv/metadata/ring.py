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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata.xla_cpu import running_sum, stage
from jkv.sharding.loops import while_loop
from jkv.state import Kept, Ring

# Entries looked at per trip of a loop.
_CHUNK = 512


class Keep(NamedTuple):
    """How ids are kept."""

    classes: Any  # i32[P], those that there are
    until: Any  # u32[P], times


def peek(ring: Ring, ranks: jax.Array) -> jax.Array:
    """Return the ids that leave at these ranks, i32[...]; the ring is unchanged.

    It has no hole among its first entries. The caller masks ranks outside the count.
    """
    return ring.ids.at[wrap(ring, ring.head + ranks)].get(mode="clip")


def pop(ring: Ring, num: jax.Array) -> Ring:
    """Drop `num` ids (i32[], at most the count) from the head, none of them a hole."""
    lowest, left = ring.by_class[0], ring.count - num
    return ring.changed(
        head=wrap(ring, ring.head + num),
        span=lowest.span - num,
        count=left if ring.kept is None else lowest.count - num,
        fewest=jnp.minimum(ring.fewest, left),
        taken=num,
    )


def push(ring: Ring, ids: jax.Array, entering: jax.Array) -> Ring:
    """Put ids that enter, i32[P] where bool[P], at the tail; none is in the ring."""
    kept = ring.kept
    if kept is None:
        return _push(ring, ids, entering)
    rank = running_sum(entering.astype(jnp.int32)).astype(jnp.uint32)
    row = jnp.where(entering, ids, kept.classes.shape[0])
    pushed = _change_each(ring, _push, ids, entering)
    return pushed.joined(
        pushed.by_class,
        entered=kept.entered.at[row].set(kept.num_entered + rank, mode="drop"),
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
    of = ring.kept.classes.at[ids].get(mode="clip")
    return ring.joined(
        [
            change(each, ids, chosen & (of == number))
            for number, each in enumerate(ring.by_class)
        ]
    )


def _push(ring: Ring, ids: jax.Array, entering: jax.Array) -> Ring:
    """Put ids at the tail of the ring of one class."""
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
    ring = _lower(ring, num)
    lowest = ring.by_class[0]
    # No hole in the whole ring: nothing to look for.
    num = jnp.where(lowest.span == lowest.count, 0, num)
    indices = _indices(lowest)
    exposed = _squeeze(lowest, indices, _reach(lowest, indices, num))
    return dataclasses.replace(exposed, kept=ring.kept)


def _lower(ring: Ring, num: jax.Array) -> Ring:
    """Let ids of higher classes follow those of the lowest, so that `num` leave."""
    lowest, *higher = ring.by_class
    for number, each in enumerate(higher):
        lacking = jnp.clip(num - lowest.count, 0, each.count)
        lowest, higher[number], _ = while_loop(
            lambda carry: carry[2] > 0,
            lambda carry: _lower_chunk(*carry),
            (lowest, each, lacking),
        )
    return ring.joined([lowest, *higher])


def _lower_chunk(
    lowest: Ring, ring: Ring, lacking: jax.Array
) -> tuple[Ring, Ring, jax.Array]:
    """Let the ids of one chunk follow the lowest class, as far as they lack."""
    indices = _indices(ring)
    ids, entry = _entries(ring, indices, jnp.arange(_CHUNK, dtype=jnp.int32))
    rank = running_sum(entry.astype(jnp.int32))
    goes = entry & (rank <= lacking)
    num = jnp.minimum(rank[-1], lacking)
    passed = jnp.sum(rank <= lacking, dtype=jnp.int32)
    passed = jnp.minimum(passed, ring.span)
    gone = jnp.where(goes, ids, indices.shape[0])
    ring = ring.changed(
        indices=indices.at[gone].set(-1, mode="drop"),
        head=wrap(ring, ring.head + passed),
        span=ring.span - passed,
        count=ring.count - num,
    )
    return _push(lowest, ids, goes), ring, lacking - num


def remove(ring: Ring, ids: jax.Array, leaving: jax.Array) -> Ring:
    """Let ids leave from wherever they stand, i32[P], all different where bool[P].

    Holes remain, so the ring is one with indices.
    """
    num = jnp.sum(leaving, dtype=jnp.int32)
    ring = ring.changed(fewest=jnp.minimum(ring.fewest, ring.count - num), taken=num)
    return _change_each(ring, _remove, ids, leaving)


def _remove(ring: Ring, ids: jax.Array, leaving: jax.Array) -> Ring:
    """Let ids leave the ring of one class."""
    indices = _indices(ring)
    num_ids = indices.shape[0]
    gone = jnp.where(leaving, ids, num_ids)
    indices = indices.at[gone].set(-1, mode="drop")
    num = jnp.sum(leaving, dtype=jnp.int32)
    ring = ring.changed(indices=indices, count=ring.count - num)
    # The ring has room for as many holes as ids; more than that are squeezed out.
    full = ring.span - ring.count > num_ids
    return _squeeze(
        ring, indices, _reach(ring, indices, jnp.where(full, ring.count, 0))
    )


def renew(
    ring: Ring, ids: jax.Array, leaving: jax.Array, keep: Keep | None = None
) -> Ring:
    """Let ids go from wherever they stand to the tail, in the order they stand here.

    Arguments as for `remove`, and what they are kept by from now on. Nothing is taken.
    """
    moved = raise_classes(remove(ring, ids, leaving), ids, keep)
    return push(moved, ids, leaving).with_account_of(ring)


def raise_classes(ring: Ring, ids: jax.Array, keep: Keep | None) -> Ring:
    """Give ids, i32[P], at least these classes and times; N is dropped.

    None of them is in the ring, or gets another class there.
    """
    kept = ring.kept
    if kept is None or keep is None:
        return ring
    return ring.joined(
        ring.by_class,
        classes=kept.classes.at[ids].max(keep.classes, mode="drop"),
        kept_until=kept.kept_until.at[ids].max(keep.until, mode="drop"),
    )


def forget(ring: Ring, ids: jax.Array, num_forgotten: jax.Array) -> Ring:
    """Note that ids, i32[P], have left for good, and lost what they were known by."""
    if ring.indices is None:
        return ring
    indices = ring.indices.at[ids].set(-1, mode="drop")
    ring = ring.changed(indices=indices, forgotten=num_forgotten)
    return _reset(ring, ids)


def _reset(ring: Ring, ids: jax.Array) -> Ring:
    """Let ids, i32[P], be of class 0, which are not in the ring of another."""
    kept = ring.kept
    if kept is None:
        return ring
    return ring.joined(
        ring.by_class,
        classes=kept.classes.at[ids].set(0, mode="drop"),
        kept_until=kept.kept_until.at[ids].set(jnp.uint32(0), mode="drop"),
    )


def lower(ring: Ring, ids: jax.Array) -> Ring:
    """Let ids, i32[P], all different, be of class 0; N is dropped.

    Those in the ring of another class go to the tail. Nothing is taken.
    """
    kept = ring.kept
    if kept is None:
        return ring
    is_free = jnp.zeros(ids.shape, bool)
    for each in ring.by_class:
        is_free |= _indices(each).at[ids].get(mode="fill", fill_value=-1) >= 0
    moves = is_free & (kept.classes.at[ids].get(mode="clip") > 0)
    out = _reset(remove(ring, ids, moves), ids)
    return push(out, ids, moves).with_account_of(ring)


def arrange(ring: Ring, stays: jax.Array) -> Ring:
    """Let ids be of class 0 that do not stay, bool[N], in the order of entering.

    A pass over all of them.
    """
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
    entered = kept.entered.at[ids].get(mode="clip")
    *_, ids = jax.lax.sort(
        (
            kept.classes.at[ids].get(mode="fill", fill_value=nothing),
            entered - kept.num_entered - 1,  # the oldest has the smallest bits
            ids,
        ),
        num_keys=2,
    )
    return refill(ring, ids, num, kept)


def in_order(ring: Ring) -> tuple[jax.Array, jax.Array]:
    """Return the ids of a ring as they leave, i32[N], N behind the last; and how many.

    Where it has classes, N ids of all there are.
    """
    capacity = sum(each.ids.shape[0] for each in ring.by_class)
    num_ids = ring.ids.shape[0] if ring.indices is None else ring.indices.shape[0]
    ids, is_entry = entries(ring, jnp.arange(capacity, dtype=jnp.int32))
    return _gather(ids, is_entry, num_ids)


def _gather(
    ids: jax.Array, chosen: jax.Array, num_ids: int
) -> tuple[jax.Array, jax.Array]:
    """Return the chosen ids, i32[N], N behind the last; and how many."""
    ranks = running_sum(chosen.astype(jnp.int32))
    index = jnp.where(chosen, ranks - 1, num_ids)
    gathered = jnp.full((num_ids,), num_ids, jnp.int32)
    return gathered.at[index].set(ids, mode="drop"), ranks[-1]


def refill(ring: Ring, ids: jax.Array, num: jax.Array, kept: Kept | None) -> Ring:
    """Return a ring of other ids, from its first index on, with the old account.

    Args:
      ring: the old one.
      ids: i32[N'], as they leave, N' behind the last.
      num: i32[], how many.
      kept: what is known of their classes; None where there is one.
    """
    if kept is None:
        return _refill(ring, ids, num)
    ring = dataclasses.replace(ring, kept=kept)
    of = kept.classes.at[ids].get(mode="fill", fill_value=-1)
    return ring.joined(
        [
            _refill(each, *_gather(ids, of == number, ids.shape[0]))
            for number, each in enumerate(ring.by_class)
        ]
    )


def _refill(ring: Ring, ids: jax.Array, num: jax.Array) -> Ring:
    """Return a ring of one class with other ids."""
    size, indices, room = ids.shape[0], None, 0
    if ring.indices is not None:
        room = size  # for holes
        index = jnp.arange(size, dtype=jnp.int32)
        indices = jnp.full((size,), -1, jnp.int32).at[ids].set(index, mode="drop")
    return ring.changed(
        ids=jnp.pad(ids, (0, room), constant_values=size),
        indices=indices,
        head=jnp.int32(0),
        span=num,
        count=num,
    )


def entries(ring: Ring, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the ids at distances from the head, i32[P], through all classes.

    And bool[P]: which of them are entries, not holes and not past the tail.
    """
    if ring.indices is None:
        return peek(ring, index), index < ring.span
    ids, is_entry = _entries(ring, ring.indices, index)
    start = ring.by_class[0].span
    for each in ring.by_class[1:]:
        more, is_more = _entries(each, _indices(each), index - start)
        ids, is_entry = jnp.where(is_more, more, ids), is_entry | is_more
        start = start + each.span
    return ids, is_entry


def _indices(ring: Ring) -> jax.Array:
    """Return where ids stand, i32[N], in a ring whose middle they may leave."""
    assert ring.indices is not None, "ids leave the middle of rings with indices only"
    return ring.indices


def _entries(
    ring: Ring, indices: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    stored_at = wrap(ring, ring.head + index)
    ids = ring.ids.at[stored_at].get(mode="clip")
    inside = (index >= 0) & (index < ring.by_class[0].span)
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
