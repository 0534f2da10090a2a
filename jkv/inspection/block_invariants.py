"""Invariants of sequences and of one group's blocks, checked by `check`.

Each function yields one message per violation.
"""

from collections.abc import Iterator

import numpy as np

from jkv.inspection.recount import Recount
from jkv.state import Metadata, Pruned, Ring


def check_lengths(meta: Metadata) -> Iterator[str]:
    """Yield rows with a negative length or one above the maximum."""
    lengths = np.asarray(meta.context_lengths)
    for row in np.flatnonzero((lengths < 0) | (lengths > meta.max_context_length)):
        yield (
            f"row {row} has length {lengths[row]}, expected 0 to "
            f"{meta.max_context_length}"
        )


def check_closed_lengths(meta: Metadata) -> Iterator[str]:
    """Yield closed rows that have tokens."""
    lengths, closed = np.asarray(meta.context_lengths), ~np.asarray(meta.is_open)
    for row in np.flatnonzero(closed & (lengths != 0)):
        yield f"row {row} is closed but has {lengths[row]} tokens"


def check_free_rows(meta: Metadata) -> Iterator[str]:
    """Yield open rows in the free ring, and closed rows missing from it."""
    closed = np.flatnonzero(~np.asarray(meta.is_open))
    yield from _compare_ring("row", meta.sequences.free_rows, closed)


def check_pending(metadata: Metadata) -> Iterator[str]:
    """Yield open sequences with an invalid number of pending tokens."""
    if metadata.sequences.num_pending is None:
        return
    pending = np.asarray(metadata.sequences.num_pending)
    most = np.minimum(np.asarray(metadata.context_lengths), metadata.max_pending)
    is_wrong = np.asarray(metadata.is_open) & ((pending < 0) | (pending > most))
    for row in np.flatnonzero(is_wrong):
        yield f"row {row} has {pending[row]} pending tokens, at most {most[row]} may be"


def check_pruned(metadata: Metadata) -> Iterator[str]:
    """Yield rows that kept more tokens than they have, and closed ones that did."""
    pruned = metadata.sequences.pruned
    if not isinstance(pruned, Pruned):
        return
    dropped, left = np.asarray(pruned.num_dropped), np.asarray(pruned.num_left)
    lengths = np.asarray(metadata.context_lengths)
    closed = ~np.asarray(metadata.is_open)
    for row in np.flatnonzero((left < 0) | (left > lengths) | (dropped < 0)):
        yield (
            f"row {row} of {lengths[row]} tokens dropped {dropped[row]} and kept "
            f"{left[row]}"
        )
    for row in np.flatnonzero(closed & ((dropped != 0) | (left != 0))):
        yield f"row {row} is closed but dropped {dropped[row]} tokens"


def check_tables(found: Recount) -> Iterator[str]:
    """Yield rows with invalid or duplicate table entries."""
    num_blocks = found.group.num_blocks
    for row, table in enumerate(found.tables):
        mapped = max(found.mapped[row], 0)
        used, rest = table[:mapped], table[mapped:]
        gone = found.gone(row)
        if np.any(used[gone] != num_blocks):
            yield f"row {row} maps a block in a released column"
        used = np.delete(used, gone)
        if np.any((used < 0) | (used >= num_blocks)):
            yield f"row {row} maps an id outside the pool"
        if np.any(rest != num_blocks):
            yield f"row {row} has an entry after its mapped blocks"
        if np.unique(used).size != used.size:
            yield f"row {row} maps a block twice"


def check_mapped(found: Recount) -> Iterator[str]:
    """Yield rows with too few blocks for their tokens, or too many for the table."""
    size, columns = found.group.block_size, found.group.max_blocks_per_sequence
    needed = -(-found.lengths // size)
    for row in np.flatnonzero((found.mapped < needed) | (found.mapped > columns)):
        yield (
            f"row {row} has {found.lengths[row]} tokens in {found.mapped[row]} blocks "
            f"of {size}, at most {columns}"
        )


def check_closed_tables(found: Recount) -> Iterator[str]:
    """Yield closed rows that have blocks."""
    for row in np.flatnonzero(~found.is_open & (found.mapped != 0)):
        yield f"row {row} is closed but has {found.mapped[row]} blocks"


def check_released(found: Recount) -> Iterator[str]:
    """Yield rows whose released blocks are invalid or still in the window."""
    size, window = found.group.block_size, found.group.window
    for row in np.flatnonzero(found.num_released).tolist():
        count = found.num_released[row]
        if count < 0 or not found.is_open[row]:
            yield f"row {row} has {count} released blocks"
            continue
        assert window.length is not None, "without a window nothing is released"
        first_seen = max(int(found.lengths[row]) - window.length + 1, 0)
        kept_from = found.gone(row).stop * size
        if kept_from > first_seen:
            yield (
                f"row {row} keeps tokens from {kept_from} on, its window needs them "
                f"from {first_seen} on"
            )


def check_counts(found: Recount) -> Iterator[str]:
    """Yield blocks whose reference count differs from their table entries."""
    counts = np.asarray(found.group.reference_counts)
    for block in np.flatnonzero(counts != found.owners):
        yield (
            f"block {block} has reference count {counts[block]}, but "
            f"{found.owners[block]} table entries"
        )


def check_partition(found: Recount) -> Iterator[str]:
    """Yield a pool whose free and live blocks do not add up."""
    live, free = int(np.sum(found.owners > 0)), int(found.group.free_blocks.count)
    if live + free != found.group.num_blocks:
        yield f"{free} free and {live} live blocks, the pool has {len(found.owners)}"


def check_free_blocks(found: Recount) -> Iterator[str]:
    """Yield rings that do not hold exactly the free blocks, and invalid classes."""
    free, live = found.group.free_blocks, found.owners > 0
    rings, kept = free.by_class, free.kept
    classes = np.zeros(len(live)) if kept is None else np.asarray(kept.classes)
    for block in np.flatnonzero((classes < 0) | (classes >= len(rings))):
        yield f"block {block} has class {classes[block]} of {len(rings)}"
    for number, ring in enumerate(rings):
        unit = "block" if kept is None else f"class {number}: block"
        own = np.flatnonzero(~live & (classes == number))
        yield from _compare_ring(unit, ring, own, int(free.count))
        if ring.indices is not None:
            for block in np.flatnonzero(live & (np.asarray(ring.indices) != -1)):
                yield f"{unit} {block} is live but has an index in the ring"


def check_private_tails(found: Recount) -> Iterator[str]:
    """Yield writable blocks with several owners."""
    for row in range(len(found.lengths)):
        writable = found.held(row, slice(found.written(row), None))
        for block in writable[found.owners[writable] > 1]:
            yield (
                f"block {block}, writable by row {row}, has reference count "
                f"{found.owners[block]}"
            )


def _compare_ring(
    unit: str, ring: Ring, expected: np.ndarray, total: int | None = None
) -> Iterator[str]:
    """Compare a ring's ids with the expected ones; `total` counts all classes."""
    capacity = ring.ids.shape[0]
    head, span, count, fewest = np.asarray(ring.bounds)[:4].tolist()
    total = count if total is None else total
    if not (
        0 <= head < capacity and count <= span <= capacity and 0 <= fewest <= total
    ):
        yield (
            f"head {head}, span {span}, count {count} and fewest {fewest} of a ring of "
            f"{capacity}"
        )
        return
    spots = (head + np.arange(span)) % capacity
    ids = np.asarray(ring.ids)[spots]
    if ring.indices is not None:  # an id stored at another index leaves a hole
        indices = np.asarray(ring.indices)
        is_id = (ids >= 0) & (ids < len(indices))
        ids = ids[~is_id | (indices[np.where(is_id, ids, 0)] == spots)]
    if len(ids) != count:
        yield f"ring has {len(ids)} ids, but count {count}"
    for entry in ids[~np.isin(ids, expected)]:
        yield f"{unit} {entry} is in the ring but not free"
    for entry in expected[~np.isin(expected, ids)]:
        yield f"{unit} {entry} is free but not in the ring"
    if np.unique(ids).size != ids.size:
        yield f"a {unit} is in the ring twice"
