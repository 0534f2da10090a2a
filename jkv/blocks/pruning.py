"""Pruning: the blocks of sequences that keep only some of their tokens.

A column of the new table row that equals one whole, aligned block of the old row is
*moved*: the table changes and nothing is copied. Every other column is *copied* row by
row, into the blocks that are not moved: the first copied column into the first of them,
and so on. Kept slots ascend, so this block's old rows lie before the sources of all
later columns, and copies in ascending order read nothing that was overwritten. If the
block is shared or cached, a fresh one takes its place, before any block is released.

A sliding window keeps its sinks, and the rows of the next token's window move by the
number of dropped tokens. Released columns may leave the first block for a copy after
the source of the second; such copies run in descending order.

Symbols in shape comments as in `jkv.state.metadata`; X heads of all layers, or 1 if all
keep the same tokens; C columns of the new row.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.blocks.row_copies import RowCopies
from jkv.metadata import allocator, tables
from jkv.metadata.part import Demand, Masks, Selection, Served
from jkv.operations import divide, gather, scatter
from jkv.state import BlockGroup, Metadata
from jkv.state.windows import Columns

_PAST_END = np.iinfo(np.int32).max


class Pruning(NamedTuple):
    """The kept tokens of B sequences in one group, before admission."""

    number: int
    metadata: Metadata  # before the call
    selection: Selection
    wrongs: Masks

    @classmethod
    def of(cls, metadata: Metadata, number: int, selection: Selection) -> "Pruning":
        """Return the plan of a group; a window needs a minimum of tokens."""
        window = metadata.groups[number].window
        wrongs: Masks = ()
        if window.length is not None:
            visible = window.num_sink_tokens + window.length - 1
            fewest = jnp.minimum(selection.lengths, visible)
            wrongs = (selection.num_kept < fewest,)
        return cls(number, metadata, selection, wrongs)

    def judge(self, eligible: jax.Array) -> "PrunedBlocks":
        """Choose moves and copies, and count the fresh blocks that copies need."""
        metadata, number = self.metadata, self.number
        num_kept = jnp.where(eligible, self.selection.num_kept, 0)
        selection = self.selection._replace(num_kept=num_kept)
        kept = _find_kept(metadata.groups[number], number, selection)
        moves = _find_moves(metadata, number, selection, kept)
        targets = _find_targets(metadata, number, moves)
        num_fresh = jnp.sum(targets.is_fresh, axis=1, dtype=jnp.int32)
        lack = Demand.of(metadata.groups[number], num_fresh)
        return PrunedBlocks(number, selection, kept, moves, targets, (lack,))


class _Kept(NamedTuple):
    """The rows that B sequences keep, by column of the new table row."""

    slots: jax.Array  # i32[B, X, C, T], old slot of each row, 0 if not needed
    is_needed: jax.Array  # bool[B, C, T], True for rows that a later token may see
    gap: Columns  # i32[B] or 0, released columns of the new row


def _find_kept(group: BlockGroup, number: int, selection: Selection) -> _Kept:
    """Return the rows that a group keeps: the selected ones, or its window's."""
    if selection.rewritten is not None:
        return _keep_all(group, selection)
    size, num_columns = group.block_size, group.max_blocks_per_sequence
    num_columns = min(-(-selection.width // size), num_columns)
    slot = jnp.arange(num_columns * size, dtype=jnp.int32)[None]
    num_kept = selection.num_kept[:, None]
    gap: Columns = 0
    is_needed, window = slot < num_kept, group.window
    if window.length is None:
        kept = selection.kept[number][..., : slot.shape[1]]
        room = slot.shape[1] - kept.shape[2]
        slots = jnp.pad(kept, ((0, 0), (0, 0), (0, room)))
    else:
        is_sink = slot < window.num_sink_tokens
        is_needed &= is_sink | (slot > num_kept - window.length)
        num_dropped = selection.lengths[:, None] - num_kept
        slots = jnp.where(is_sink, slot, slot + num_dropped)[:, None]
        gap = window.unseen_from(selection.num_kept, size)
    slots = jnp.where(is_needed[:, None], slots, 0)
    return _Kept(
        slots.reshape(*slots.shape[:2], num_columns, size),
        is_needed.reshape(-1, num_columns, size),
        gap,
    )


def _keep_all(group: BlockGroup, selection: Selection) -> _Kept:
    """Return all rows of the mapped blocks, where they are."""
    size, num_columns = group.block_size, group.max_blocks_per_sequence
    table = gather(group.block_tables, selection.seq_ids)
    slot = jnp.arange(num_columns * size, dtype=jnp.int32).reshape(1, -1, size)
    is_needed = (table < group.num_blocks)[:, :, None]
    is_needed = is_needed & (slot < selection.num_kept[:, None, None])
    slots = jnp.where(is_needed, slot, 0)[:, None]
    return _Kept(slots, is_needed, group.window.gaps_of(selection.seq_ids))


class _Moves(NamedTuple):
    """The columns of new rows that are moved, and the old columns left over."""

    old: jax.Array  # i32[B, M], old table rows
    is_moved: jax.Array  # bool[B, C]
    block: jax.Array  # i32[B, C], the moved block
    is_forgotten: jax.Array  # bool[B, C], moved out of the prefix index
    is_copied: jax.Array  # bool[B, C]
    is_left: jax.Array  # bool[B, M], old columns that are not moved
    # i32[B, C] each, first and last old column of a copied column's rows; None where
    # ascending order is always possible.
    sources: tuple[jax.Array, jax.Array] | None


def _find_moves(
    metadata: Metadata, number: int, selection: Selection, kept: _Kept
) -> _Moves:
    """Find the columns that are whole, aligned blocks of the old rows."""
    group, index = metadata.groups[number], metadata.index
    size, num_columns = group.block_size, group.max_blocks_per_sequence
    # All needed rows of a whole block imply the same first slot, a multiple of T.
    is_needed = kept.is_needed[:, None]
    first_slots = kept.slots - jnp.arange(size, dtype=jnp.int32)[None, None, None]
    lowest = jnp.min(jnp.where(is_needed, first_slots, _PAST_END), axis=(1, 3))
    highest = jnp.max(jnp.where(is_needed, first_slots, -1), axis=(1, 3))
    source, rest = divide(lowest, size)
    is_whole = (lowest == highest) & (rest == 0)
    source = jnp.where(is_whole, source, num_columns)

    old = gather(group.block_tables, selection.seq_ids)
    column = jnp.arange(source.shape[1], dtype=jnp.int32)[None]
    block = _take(old, source)
    stays = is_whole & (source == column)
    # Rows are appended to a tail; a cached block needs its parent before it.
    is_full = column < divide(selection.num_kept, size)[0][:, None]
    if selection.rewritten is not None:
        is_full = stays = ~selection.rewritten
    is_own = _count_references(group, block) == 1
    is_known = index.knows(metadata, number, block)
    intact = jnp.cumprod(stays & is_full, axis=1, dtype=jnp.int32) > 0
    is_bound = is_known & ~intact
    if not index.has_parents(metadata, number):
        is_bound = jnp.zeros_like(is_known)
    is_moved = is_whole & (is_own | (is_full & ~is_bound))
    if selection.rotates:
        is_moved &= stays
    is_copied = jnp.any(kept.is_needed, axis=2) & ~is_moved

    request = jnp.arange(old.shape[0], dtype=jnp.int32)[:, None]
    taken = jnp.where(is_moved, source, num_columns)
    is_left = scatter(old < group.num_blocks, (request, taken), False)
    sources = None
    if group.window.length is not None:
        sources = (
            jnp.min(jnp.where(is_needed, kept.slots, _PAST_END), axis=(1, 3)) // size,
            jnp.max(jnp.where(is_needed, kept.slots, -1), axis=(1, 3)) // size,
        )
    return _Moves(
        old=old,
        is_moved=is_moved,
        block=block,
        is_forgotten=is_moved & is_known & (is_bound | ~is_full),
        is_copied=is_copied,
        is_left=is_left,
        sources=sources,
    )


class _Targets(NamedTuple):
    """The blocks of copied columns."""

    column: jax.Array  # i32[B, C], the old column of the block, M if there is none
    block: jax.Array  # i32[B, C], this block
    is_fresh: jax.Array  # bool[B, C], True if a fresh block takes its place
    is_forgotten: jax.Array  # bool[B, C], overwritten blocks of the prefix index
    descends: jax.Array | None  # bool[B], order of the copies; None: all ascend


def _find_targets(metadata: Metadata, number: int, moves: _Moves) -> _Targets:
    """Assign the left blocks to the copied columns, in order."""
    group, num_columns = metadata.groups[number], moves.old.shape[1]
    request = jnp.arange(moves.old.shape[0], dtype=jnp.int32)[:, None]
    rank = jnp.cumsum(moves.is_left, axis=1, dtype=jnp.int32) - 1
    column = jnp.broadcast_to(jnp.arange(num_columns, dtype=jnp.int32), rank.shape)
    listed = jnp.full(rank.shape, num_columns, jnp.int32)
    cells = request, jnp.where(moves.is_left, rank, num_columns)
    listed = scatter(listed, cells, column)
    nth = jnp.cumsum(moves.is_copied, axis=1, dtype=jnp.int32) - 1
    column = jnp.take_along_axis(listed, jnp.maximum(nth, 0), axis=1)

    block = _take(moves.old, column)
    is_there = moves.is_copied & (column < num_columns)
    is_own = is_there & (_count_references(group, block) == 1)
    is_known = is_own & metadata.index.knows(metadata, number, block)
    # Cached blocks stay findable if there is room for all of their replacements.
    needs_fresh = moves.is_copied & ~is_own
    num_wanted = jnp.sum(needs_fresh | is_known, dtype=jnp.int32)
    has_room = num_wanted <= group.free_blocks.count
    is_fresh = needs_fresh | (is_known & has_room)
    descends = None
    if moves.sources is not None:
        descends = _overtakes(moves, jnp.where(is_fresh, -1, column))
    return _Targets(column, block, is_fresh, is_known & ~is_fresh, descends)


def _overtakes(moves: _Moves, target: jax.Array) -> jax.Array:
    """Return True if a copy to old columns, i32[B, C], precedes a read of them."""
    assert moves.sources is not None
    first = jnp.where(moves.is_copied, moves.sources[0], _PAST_END)
    later = jax.lax.cummin(first, axis=1, reverse=True)[:, 1:]
    return jnp.any(moves.is_copied[:, :-1] & (target[:, :-1] >= later), axis=1)


class PrunedBlocks(NamedTuple):
    """Moves and copies of the blocks of B sequences."""

    number: int
    selection: Selection
    kept: _Kept
    moves: _Moves
    targets: _Targets
    lacks: tuple[Demand, ...]

    def apply(self, metadata: Metadata, done: Served) -> tuple[Metadata, RowCopies]:
        """Map the new rows, release the blocks left over, and list the copies."""
        moves, targets = self.moves, self.targets
        nothing, served = metadata.groups[self.number].num_blocks, done.served[:, None]
        forgotten = jnp.concatenate(
            [
                jnp.where(targets.is_forgotten & served, targets.block, nothing),
                jnp.where(moves.is_forgotten & served, moves.block, nothing),
            ]
        )
        metadata = metadata.index.forget_rewritten(
            metadata, self.number, forgotten.reshape(-1)
        )
        in_place = moves.is_copied & ~targets.is_fresh & served
        reused = jnp.where(in_place, targets.block, nothing)
        mapped = jnp.where(moves.is_moved, moves.block, reused)
        metadata = self._map(metadata, done, mapped)
        metadata, fresh = self._take_fresh(metadata, done)
        group = self._release(metadata.groups[self.number], done, in_place)
        target = jnp.where(targets.is_fresh & served, fresh, reused)
        group = self._copy_tokens(group, target)
        metadata = metadata.with_group(self.number, group)
        return metadata, self._list_copies(target)

    def _map(self, metadata: Metadata, done: Served, mapped: jax.Array) -> Metadata:
        """Write new table rows, i32[B, C], without fresh blocks."""
        group, row = metadata.groups[self.number], done.rows(metadata)
        width = group.max_blocks_per_sequence - mapped.shape[1]
        table = jnp.pad(mapped, ((0, 0), (0, width)), constant_values=group.num_blocks)
        num_mapped = tables.num_blocks_for(self.selection.num_kept, group.block_size)
        return metadata.changed(
            self.number,
            block_tables=scatter(group.block_tables, row, table),
            num_mapped_blocks=scatter(group.num_mapped_blocks, row, num_mapped),
            window=group.window.with_gaps(row, self.kept.gap),
        )

    def _take_fresh(
        self, metadata: Metadata, done: Served
    ) -> tuple[Metadata, jax.Array]:
        """Take fresh blocks before any release; return them, i32[B, C]."""
        is_fresh = self.targets.is_fresh & done.served[:, None]
        flat = is_fresh.reshape(-1)
        row = jnp.broadcast_to(done.rows(metadata)[:, None], is_fresh.shape)
        column = jnp.arange(is_fresh.shape[1], dtype=jnp.int32)
        metadata, block = allocator.grant(
            metadata,
            self.number,
            jnp.where(flat, row.reshape(-1), metadata.max_sequences),
            jnp.broadcast_to(column, is_fresh.shape).reshape(-1),
            jnp.cumsum(flat, dtype=jnp.int32) - 1,
            jnp.sum(flat, dtype=jnp.int32),
        )
        return metadata, block.reshape(is_fresh.shape)

    def _release(
        self, group: BlockGroup, done: Served, in_place: jax.Array
    ) -> BlockGroup:
        """Release the left blocks that no copy reuses, last columns first."""
        old, width = self.moves.old, group.max_blocks_per_sequence
        request = jnp.arange(old.shape[0], dtype=jnp.int32)[:, None]
        reused = jnp.where(in_place, self.targets.column, width)
        is_released = scatter(self.moves.is_left, (request, reused), False)
        is_released &= done.served[:, None]
        released = jnp.where(is_released, old, group.num_blocks)
        return allocator.drop_references(group, released[:, ::-1].reshape(-1))

    def _copy_tokens(self, group: BlockGroup, target: jax.Array) -> BlockGroup:
        """Copy recorded tokens to blocks, i32[B, C]; -1 where heads differ."""
        if group.tokens is None:
            return group
        slots = self.kept.slots
        is_known = self.kept.is_needed & jnp.all(slots == slots[:, :1], axis=1)
        column, offset = divide(slots[:, 0], group.block_size)
        request = jnp.arange(column.shape[0], dtype=jnp.int32)[:, None, None]
        recorded = gather(
            group.tokens, (gather(self.moves.old, (request, column)), offset)
        )
        tokens = scatter(group.tokens, target, jnp.where(is_known, recorded, -1))
        return dataclasses.replace(group, tokens=tokens)

    def _list_copies(self, target: jax.Array) -> RowCopies:
        """List the copies in their order."""
        slots = self.kept.slots
        column = jnp.arange(target.shape[1], dtype=jnp.int32)
        column = jnp.broadcast_to(column, target.shape)
        if self.targets.descends is not None:
            backwards = target.shape[1] - 1 - column
            order = jnp.where(self.targets.descends[:, None], backwards, column)
            target = jnp.take_along_axis(target, order, axis=1)
            slots = jnp.take_along_axis(slots, order[:, None, :, None], axis=2)
            column = order
        return RowCopies(slots, self.moves.old, target, column)


def _take(old: jax.Array, column: jax.Array) -> jax.Array:
    """Return the blocks of old table rows, i32[B, M], at columns, i32[B, C]."""
    last = old.shape[1] - 1
    return jnp.take_along_axis(old, jnp.minimum(column, last), axis=1)


def _count_references(group: BlockGroup, block: jax.Array) -> jax.Array:
    return gather(group.reference_counts, block, fill=0)
