"""Blocks of a pool, as a part of a model (`jkv.metadata.part`), and their plans.

A method of `Blocks` returns the plan of a call: its demand on the pool, and `apply`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.blocks import pruning, sharing
from jkv.blocks.sharing import BlockCopies
from jkv.blocks.swapped import SwapInBlocks, SwappedGroup, fetch_group
from jkv.metadata import allocator, tables
from jkv.metadata.part import Demand, Granted, Lengths, Masks, Selection, Served, Step
from jkv.operations import (
    Entries,
    for_each_entry,
    gather,
    list_entries,
    scatter,
    scatter_add,
)
from jkv.state import BlockGroup, BlockStorage, Cache, Metadata
from jkv.state.index import Found


class Opening(NamedTuple):
    """Blocks of new sequences: cached ones, and reserved ones."""

    number: int
    found: Found
    fresh: jax.Array  # i32[B], blocks to reserve in addition to the ones found
    lacks: tuple[Demand, ...]

    def pin(self, metadata: Metadata, row: jax.Array) -> Metadata:
        """Map the blocks found, so that they are not evicted."""
        return sharing.enter_found(metadata, self.number, row, self.found)

    def apply(
        self, metadata: Metadata, done: Served
    ) -> tuple[Metadata, BlockCopies | None]:
        """Reserve fresh blocks after the blocks found; copy a partial match."""
        first, fresh = self.found.num_blocks, jnp.where(done.served, self.fresh, 0)
        row = done.rows(metadata)
        metadata = _reserve(metadata, self.number, row, first, fresh)
        return sharing.copy_part(metadata, self.number, row, self.found)


def _reserve(
    metadata: Metadata,
    number: int,
    row: jax.Array,
    first: jax.Array,
    num_fresh: jax.Array,
) -> Metadata:
    """Map `num_fresh` blocks, i32[B], from column `first` of rows on, i32[B].

    A row of S or above is dropped.
    """
    num_taken = jnp.sum(num_fresh, dtype=jnp.int32)
    group = metadata.groups[number]
    most = num_fresh.shape[0] * group.max_blocks_per_sequence
    most = min(group.num_blocks, most)
    metadata, taken = allocator.take(metadata, number, num_taken, most)
    mapped = scatter(group.num_mapped_blocks, row, first + num_fresh)
    metadata = metadata.changed(number, num_mapped_blocks=mapped)

    # Entry e of the call's reservations gets block e of the blocks taken.
    def reserve(metadata: Metadata, at: Entries) -> Metadata:
        table_row = jnp.where(at.valid, gather(row, at.request), metadata.max_sequences)
        column = gather(first, at.request) + at.rank
        block = taken.peek(at.number)
        return allocator.enter(metadata, number, table_row, column, block)

    return for_each_entry(num_fresh, most, reserve, metadata)


class Growing(NamedTuple):
    """Blocks that growing sequences take and release."""

    number: int
    mapped: jax.Array  # i32[B], blocks before the call
    lacks: tuple[Demand, ...]

    def apply(
        self, metadata: Metadata, step: Step, granted: tuple[Granted, ...]
    ) -> tuple[Metadata, jax.Array]:
        """Map a fresh block for each row that begins one."""
        number, (of_pool,) = self.number, granted
        # First release the blocks outside the window of this and all later steps.
        group, grows = metadata.groups[number], step.query_lengths > 0
        group = tables.slide_window(group, step.done.seq_ids, step.length, grows)
        metadata = metadata.with_group(number, group)
        # Fresh blocks follow the mapped ones.
        need = jnp.where(step.done.served, of_pool.num, 0)
        num_taken = jnp.sum(need, dtype=jnp.int32)
        row = step.done.rows(metadata)
        if step.is_decoding:  # at most one block each
            opens = jnp.where(need > 0, row, metadata.max_sequences)
            cells = opens, self.mapped, of_pool.before
        else:
            # The rows fill that many blocks, and each request begins one more.
            most = len(need) + step.num_rows // group.block_size
            at = list_entries(of_pool.before, num_taken, 0, most)
            opens = jnp.where(at.valid, gather(row, at.request), metadata.max_sequences)
            cells = opens, gather(self.mapped, at.request) + at.rank, at.number
        metadata, _ = allocator.grant(metadata, number, *cells, num_taken)
        group = metadata.groups[number]
        mapped = scatter_add(group.num_mapped_blocks, row, need)
        group = dataclasses.replace(group, num_mapped_blocks=mapped)
        block = tables.blocks_at(group, step.table_row, step.column)
        if group.tokens is not None and step.tokens is not None:
            tokens = scatter(group.tokens, (block, step.offset), step.tokens)
            group = dataclasses.replace(group, tokens=tokens)
        return metadata.with_group(number, group), block


class Sharing(NamedTuple):
    """Full blocks shared with parents, and tails copied from them."""

    number: int
    group: BlockGroup  # before the call
    length: Lengths
    past: sharing.ParentBlocks
    wrongs: Masks
    lacks: tuple[Demand, ...] = ()

    def judge(self, eligible: jax.Array) -> "Sharing":
        """Count a block for each partly filled tail."""
        need = (eligible & (self.length.tail > 0)).astype(jnp.int32)
        return self._replace(lacks=(Demand.of(self.group, need),))

    def apply(self, metadata: Metadata, done: Served) -> tuple[Metadata, BlockCopies]:
        """Increment the reference counts of full blocks, and map them."""
        number, past, length = self.number, self.past, self.length
        group = metadata.groups[number]
        group = sharing.reference_parents(group, past, length, done.served)
        metadata = metadata.with_group(number, group)
        return sharing.adopt(metadata, number, past, length, done)


class Exchanging(NamedTuple):
    """Sharing by sequences that release their old blocks."""

    number: int
    seq_ids: jax.Array  # i32[B]
    length: Lengths
    past: sharing.ParentBlocks

    def release(self, metadata: Metadata, served: jax.Array) -> Metadata:
        """Increment the counts of the parents' full blocks; release the old blocks."""
        # In this order a block in both sets stays live.
        group = metadata.groups[self.number]
        group = sharing.reference_parents(group, self.past, self.length, served)
        mapped = gather(group.num_mapped_blocks, self.seq_ids)
        gap = group.window.gaps_of(self.seq_ids)
        last = jnp.where(served, mapped, 0)
        group = tables.release_kept(group, self.seq_ids, last, gap)
        return metadata.with_group(self.number, group)

    def apply(self, metadata: Metadata, done: Served) -> tuple[Metadata, BlockCopies]:
        """Release the old blocks, and map the parents'."""
        metadata = self.release(metadata, done.served)
        return sharing.adopt(metadata, self.number, self.past, self.length, done)


class Cutting(NamedTuple):
    """Truncation of sequences."""

    number: int
    group: BlockGroup  # before the call
    seq_ids: jax.Array  # i32[B]
    lengths: jax.Array  # i32[B]
    wrongs: Masks

    def judge(self, eligible: jax.Array) -> "CutBlocks":
        """Find the partly filled last block of each request, and if it is shared."""
        group, lengths = self.group, jnp.where(eligible, self.lengths, 0)
        column, tail = tables.locate(lengths, group.block_size)
        is_cut = eligible & (tail > 0)
        block = gather(group.block_tables, (self.seq_ids, column))
        has_others = gather(group.reference_counts, block) > 1
        is_shared = is_cut & has_others
        lack = Demand.of(group, is_shared.astype(jnp.int32))
        return CutBlocks(
            self.number, lengths, column, is_cut, block, is_shared, (lack,)
        )


class CutBlocks(NamedTuple):
    """The partly filled last blocks after a truncation, for B requests."""

    number: int
    lengths: jax.Array  # i32[B], 0 unless eligible
    column: jax.Array  # i32[B], table column
    is_cut: jax.Array  # bool[B], True if the last block is partly filled
    block: jax.Array  # i32[B]
    is_shared: jax.Array  # bool[B], True if it is partly filled and shared
    lacks: tuple[Demand, ...]

    def apply(self, metadata: Metadata, done: Served) -> tuple[Metadata, BlockCopies]:
        """Release the blocks past the end, and copy shared last blocks."""
        number, group = self.number, metadata.groups[self.number]
        copied = self.is_shared & done.served
        kept = tables.num_blocks_for(self.lengths, group.block_size)
        mapped = gather(group.num_mapped_blocks, done.seq_ids)
        # A copied last block is released with the blocks past the end.
        first = kept - copied.astype(jnp.int32)
        last = jnp.where(done.served, mapped, 0)
        group = tables.release_blocks(group, done.seq_ids, first, last)
        metadata, copies = sharing.take_tails(
            metadata.with_group(number, group),
            number,
            copied,
            done.seq_ids,
            self.column,
            self.block,
        )
        rewritten = done.served & self.is_cut & ~copied
        metadata = metadata.index.forget_rewritten(
            metadata, number, jnp.where(rewritten, self.block, group.num_blocks)
        )
        group = metadata.groups[number]
        row = done.rows(metadata)
        emptied = jnp.where(self.lengths == 0, row, metadata.max_sequences)
        num_mapped = scatter(group.num_mapped_blocks, row, kept)
        window = group.window.with_gaps(emptied, 0)
        changed = metadata.changed(number, num_mapped_blocks=num_mapped, window=window)
        return changed, copies


class Entering(NamedTuple):
    """Blocks for swapped-in sequences."""

    number: int
    to_enter: SwapInBlocks
    lacks: tuple[Demand, ...]

    def apply(self, metadata: Metadata, row: jax.Array) -> tuple[Metadata, jax.Array]:
        """Map fresh blocks, shared as in the swapped-out tables."""
        number, to_enter = self.number, self.to_enter
        group = metadata.groups[number]
        served, nothing = row < group.max_sequences, group.num_blocks
        mapped = served[:, None] & (to_enter.block_tables < to_enter.num_blocks)
        num_taken = jnp.where(jnp.any(served), to_enter.num_blocks, 0)
        # Local block numbers are the order in which the blocks leave the pool.
        most = min(nothing, to_enter.block_tables.size)
        metadata, taken = allocator.take(metadata, number, num_taken, most)
        block = jnp.where(mapped, taken.peek(to_enter.block_tables), nothing)
        first = jnp.where(to_enter.is_first, block, nothing)
        metadata = allocator.forget_taken(metadata, number, first.reshape(-1))

        # The blocks have no references yet: each entry adds one.
        group = metadata.groups[number]
        mapped = jnp.sum(mapped, axis=1, dtype=jnp.int32) + to_enter.num_released
        metadata = metadata.changed(
            number,
            block_tables=scatter(group.block_tables, row, block),
            num_mapped_blocks=scatter(group.num_mapped_blocks, row, mapped),
            reference_counts=scatter_add(group.reference_counts, block, 1),
            window=group.window.with_gaps(row, to_enter.num_released),
        )
        return metadata, block


class Blocks(NamedTuple):
    """Blocks of the sequences in the pool of one group."""

    number: int  # static, the group's index

    @classmethod
    def of(cls, numbers: tuple[int, ...]) -> tuple["Blocks", ...]:
        """Return one part per group."""
        return tuple(map(cls, numbers))

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.number,)

    def open(
        self,
        metadata: Metadata,
        found: Found,
        num_tokens: jax.Array,
        eligible: jax.Array,
    ) -> Opening:
        """Count the blocks to reserve, and the cost of the blocks found.

        Blocks found are not taken from the pool, but a cached one stops being free: its
        cost falls on the first request that revives it.
        """
        group, of_group = metadata.groups[self.number], found.groups[self.number]
        size = group.block_size
        total = tables.num_blocks_for(num_tokens, size)
        cached = tables.num_blocks_for(found.num_copied(size), size)
        fresh = jnp.maximum(
            group.window.to_reserve(total, found.num_blocks, of_group.gap, size),
            cached - found.num_blocks,
        )
        blocks = jnp.where(eligible[:, None], of_group.blocks, group.num_blocks)
        revivals = allocator.find_revivals(group, blocks)
        fresh = jnp.where(eligible, fresh, 0)
        wants = (fresh > 0) | revivals.wants
        lack = Demand.of(group, fresh + revivals.costs, wants)
        return Opening(self.number, found, fresh, (lack,))

    def grow(
        self,
        metadata: Metadata,
        seq_ids: jax.Array,
        new_length: jax.Array,
        eligible: jax.Array,
    ) -> Growing:
        """Count the blocks that `new_length`, i32[B], adds to the mapped ones."""
        group = metadata.groups[self.number]
        mapped = gather(group.num_mapped_blocks, seq_ids)
        blocks = tables.num_blocks_for(new_length, group.block_size)
        need = jnp.where(eligible, jnp.maximum(blocks - mapped, 0), 0)
        return Growing(self.number, mapped, (Demand.of(group, need),))

    def share(self, metadata: Metadata, parents: jax.Array, length: Lengths) -> Sharing:
        """Share full blocks, and copy partly filled last blocks."""
        group = metadata.groups[self.number]
        cut_off = group.window.cuts_off(parents, length.tokens, group.block_size)
        past = sharing.find_parent_blocks(group, parents, length)
        return Sharing(self.number, group, length, past, (cut_off,))

    def cut(
        self, metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
    ) -> Cutting:
        """Release the blocks past the new end; copy a shared last block."""
        group = metadata.groups[self.number]
        cut_off = group.window.cuts_off(seq_ids, lengths, group.block_size)
        return Cutting(self.number, group, seq_ids, lengths, (cut_off,))

    def prune(self, metadata: Metadata, selection: Selection) -> pruning.Pruning:
        """Move whole blocks, and copy the rows of others."""
        return pruning.Pruning.of(metadata, self.number, selection)

    def enter(self, metadata: Metadata, to_enter: dict[int, SwapInBlocks]) -> Entering:
        """Take as many blocks as the swapped-in sequences have."""
        own = to_enter[self.number]
        lack = Demand.of(metadata.groups[self.number], own.num_blocks[None])
        return Entering(self.number, own, (lack,))

    def exchange(
        self,
        metadata: Metadata,
        seq_ids: jax.Array,
        parents: jax.Array,
        length: Lengths,
    ) -> Exchanging:
        """Release the old blocks, share the parents' full ones, copy their tails."""
        past = sharing.find_parent_blocks(metadata.groups[self.number], parents, length)
        return Exchanging(self.number, seq_ids, length, past)

    def close(
        self, metadata: Metadata, seq_ids: jax.Array, closable: jax.Array
    ) -> Metadata:
        """Release all blocks of sequences."""
        group = metadata.groups[self.number]
        group = tables.empty_rows(group, seq_ids, closable)
        return metadata.with_group(self.number, group)

    def follow(self, storage: BlockStorage, moves: sharing.BlockCopies) -> BlockStorage:
        return sharing.copy_blocks(storage, moves)

    def keep(self, _rows: jax.Array, _places: jax.Array) -> None:
        """Return None: indexed blocks need no copy."""

    def leave(
        self, metadata: Metadata, seq_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the block tables, i32[B, M], and released columns, i32[B]."""
        group = metadata.groups[self.number]
        gap = jnp.asarray(group.window.gaps_of(seq_ids), jnp.int32)
        tables = gather(group.block_tables, seq_ids)
        return tables, jnp.broadcast_to(gap, seq_ids.shape)

    def fetch(
        self,
        cache: Cache,
        _seq_ids: np.ndarray,
        lengths: np.ndarray,
        left: tuple[np.ndarray, np.ndarray],
    ) -> dict[int, SwappedGroup]:
        """Copy the blocks to the host, shared ones once."""
        return {self.number: fetch_group(cache, self.number, lengths, left)}

    def num_free(self, metadata: Metadata) -> tuple[jax.Array, ...]:
        return (metadata.groups[self.number].free_blocks.count,)
