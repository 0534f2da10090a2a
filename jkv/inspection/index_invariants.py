"""Invariants of the prefix index, checked by `check`.

Each function yields one message per violation.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jkv.inspection.recount import Recount
from jkv.prefixes.arrays import IndexArrays, PairedBlocks, Snapshots


def check_indexed(index: IndexArrays, found: Recount) -> Iterator[str]:
    """Yield indexed blocks that lookups miss, or find for another sequence."""
    nothing = found.group.num_blocks
    hashes, parents = np.asarray(index.hashes), np.asarray(index.parents)
    salts, contents = np.asarray(index.salts), np.asarray(found.group.tokens)
    indexed = np.flatnonzero(hashes)
    buckets = np.asarray(index.table)[:nothing]
    for block in indexed[~np.isin(indexed, buckets)]:
        yield f"block {block} is indexed, but in no bucket"
    chains: dict[tuple[Any, ...], int] = {}
    for block in indexed.tolist():
        parent = int(parents[block])
        if not 0 <= parent <= nothing:
            yield f"block {block} has parent {parent}, which is not a block"
            continue
        if parent != nothing and (hashes[parent] == 0 or parent == block):
            yield f"block {block} has parent {parent}, which is not indexed"
        elif parent != nothing and salts[parent] != salts[block]:
            yield f"block {block} and its parent have different cache salts"
        if np.any(contents[block] < 0):
            yield f"block {block} is indexed without all of its tokens"
        key: tuple[Any, ...] = (parent, int(salts[block]), contents[block].tobytes())
        if index.wide_hashes is not None:
            words = [hashes[block], *np.asarray(index.wide_hashes)[block]]
            key = (*key, tuple(words))
        if key in chains:
            yield f"blocks {chains[key]} and {block} are equal"
        chains[key] = block
    yield from _check_order(index, found, indexed)


def _check_order(
    index: IndexArrays, found: Recount, indexed: np.ndarray
) -> Iterator[str]:
    """Yield blocks that outlive their parent: parents are evicted last."""
    free, live = found.group.free_blocks, found.owners > 0
    parents = np.asarray(index.parents)
    turn = np.full(len(live), -1)
    for ring in free.by_class:
        behind = (np.asarray(ring.indices) - int(ring.head)) % ring.ids.shape[0]
        turn = np.where(np.asarray(ring.indices) >= 0, turn.max() + 1 + behind, turn)
    children = indexed[parents[indexed] != found.group.num_blocks]
    if free.kept is not None:
        classes = np.asarray(free.kept.classes)
        for block in children[classes[children] > classes[parents[children]]]:
            yield f"block {block} is of a higher class than its parent {parents[block]}"
    for block in children[~live[parents[children]]]:
        if live[block] or turn[block] > turn[parents[block]]:
            yield f"block {block} outlives its parent {parents[block]}"


def check_committed(index: IndexArrays, found: Recount) -> Iterator[str]:
    """Yield rows with an invalid committed chain, or indexed blocks after it."""
    nothing = found.group.num_blocks
    hashes, parents = np.asarray(index.hashes), np.asarray(index.parents)
    committed = np.asarray(index.committed)
    for row in np.flatnonzero(found.is_open).tolist():
        if not -1 <= committed[row] <= found.lengths[row]:
            yield f"row {row} committed {committed[row]} of {found.lengths[row]} tokens"
            continue
        if found.is_pruned[row] or committed[row] < 0:
            yield from _check_stopped_row(index, found, row)
            continue
        num = _num_committed(index, found, row)
        chain = found.held(row, slice(0, num))
        if index.wide_hashes is None:
            before = np.concatenate([[nothing], chain])[: len(chain)]
        else:  # wide hashes include the prefix, so blocks store no parent
            before = np.full_like(chain, nothing)
        if np.any(hashes[chain] == 0) or np.any(parents[chain] != before):
            yield f"the committed blocks of row {row} are not a chain"
        if np.any(hashes[found.held(row, slice(num, None))] != 0):
            yield f"row {row} has an indexed block that is writable"


def _check_stopped_row(index: IndexArrays, found: Recount, row: int) -> Iterator[str]:
    """Yield indexed blocks, without their parent, of a row that commits no more.

    Blocks without stored parents may stay indexed where they were moved.
    """
    is_indexed = np.asarray(index.hashes) != 0
    full = found.held(row, slice(0, found.written(row)))
    num = int(np.cumprod(is_indexed[full]).sum())
    before = np.concatenate([[found.group.num_blocks], full[:num]])[:num]
    if index.wide_hashes is None and (
        np.any(is_indexed[full[num:]])
        or np.any(np.asarray(index.parents)[full[:num]] != before)
    ):
        yield f"row {row} has an indexed block without its parent"
    if np.any(is_indexed[found.held(row, slice(found.written(row), None))]):
        yield f"row {row} has an indexed block that is writable"


def check_pairs(
    index: IndexArrays, leader: Recount, found: Recount, beside: PairedBlocks
) -> Iterator[str]:
    """Yield blocks of a group that are paired with the wrong leading block.

    If both sides of a pair agree and the leader's block is indexed, a lookup finds the
    group's block through it. The two then hold the same tokens: no sequence may write
    to the block, and a sequence that committed it in a column has that leader's block
    in the column, since no two indexed blocks are equal.
    """
    nothing, no_leader = found.group.num_blocks, leader.group.num_blocks
    partners, above = np.asarray(beside.partners), np.asarray(beside.beside)
    for block, partner in _find_outside(partners, nothing):
        yield f"block {block} has partner {partner}, which is not a block"
    for block, leading in _find_outside(above, no_leader):
        yield f"block {block} is paired with {leading}, which is not a block"
    is_pair = np.append(partners, -1)[above] == np.arange(nothing)
    is_found = is_pair & (np.append(np.asarray(index.hashes), 0)[above] != 0)
    for row in np.flatnonzero(found.is_open).tolist():
        writable = found.held(row, slice(found.written(row), None))
        for block in writable[is_found[writable]]:
            yield f"row {row} has a cached block {block} that is writable"
        num = _num_committed(index, leader, row)
        pair = leader.tables[row, :num], found.tables[row, :num]
        for leading, block in np.stack(pair, axis=1).tolist():
            if leading == no_leader or block == nothing or not is_found[block]:
                continue  # released, or not cached
            if above[block] != leading:
                yield (
                    f"row {row} pairs block {block} with {leading}, the index with "
                    f"{above[block]}"
                )


def _find_outside(ids: np.ndarray, nothing: int) -> list[tuple[int, int]]:
    """Return pairs of block and stored id, for ids outside 0 to `nothing`."""
    blocks = np.flatnonzero((ids < 0) | (ids > nothing))
    return list(zip(blocks.tolist(), ids[blocks].tolist(), strict=True))


def _num_committed(index: IndexArrays, found: Recount, row: int) -> int:
    """Return the number of committed blocks of a row."""
    return max(int(np.asarray(index.committed)[row]), 0) // found.group.block_size


def check_snapshots(snapshots: Snapshots, max_pending: int) -> Iterator[str]:
    """Yield invalid snapshots, and duplicates of one sequence."""
    known = dict[tuple[int, bytes], int]()
    lengths, rows = np.asarray(snapshots.lengths), np.asarray(snapshots.tokens)
    for snapshot_id in np.flatnonzero(lengths).tolist():
        length, pending = (
            int(lengths[snapshot_id]),
            int(snapshots.num_pending[snapshot_id]),
        )
        if not 0 < length <= rows.shape[1] or length % snapshots.every:
            yield f"snapshot {snapshot_id} has length {length}"
            continue
        if not 0 <= pending <= min(max_pending, length):
            yield f"snapshot {snapshot_id} has {pending} pending tokens"
        tokens = rows[snapshot_id, :length]
        if np.any(tokens < 0):
            yield f"snapshot {snapshot_id} has tokens that were not recorded"
        key = int(snapshots.salts[snapshot_id]), tokens.tobytes()
        if key in known:
            yield f"snapshots {known[key]} and {snapshot_id} are of the same sequence"
        known[key] = snapshot_id
