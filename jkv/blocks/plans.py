"""What calls do with the blocks of one pool: the plans of `jkv.blocks.part`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.blocks import sharing
from jkv.blocks.sharing import BlockCopies
from jkv.indexing import gather, scatter, scatter_add
from jkv.metadata import allocator, ring, tables
from jkv.metadata.entries import Entries, for_each_entry, list_entries
from jkv.metadata.part import Done, Granted, Lack, Lengths, Masks, Step
from jkv.state import BlockGroup, Metadata
from jkv.state.index import Found


class Opening(NamedTuple):
    """What new sequences have from the start: found blocks, and reserved ones."""

    number: int
    found: Found
    fresh: jax.Array  # i32[B], blocks to reserve beside those found
    lacks: tuple[Lack, ...]

    def pin(self, metadata: Metadata, row: jax.Array) -> Metadata:
        """Enter what was found in the tables, so that nobody takes it."""
        return sharing.enter_found(metadata, self.number, row, self.found)

    def apply(
        self, metadata: Metadata, done: Done
    ) -> tuple[Metadata, BlockCopies | None]:
        """Reserve fresh blocks behind those found; copy the part of one."""
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
    """Map fresh blocks, i32[B], of a group behind the columns that rows have, i32[B].

    A row of S or above is dropped.
    """
    num_taken = jnp.sum(num_fresh, dtype=jnp.int32)
    metadata, before = allocator.take(metadata, number, num_taken)
    group = metadata.groups[number]
    mapped = scatter(group.num_mapped_blocks, row, first + num_fresh)
    metadata = metadata.changed(number, num_mapped_blocks=mapped)

    # Entry e of the call's reservations is block e of those taken.
    def reserve(metadata: Metadata, at: Entries) -> Metadata:
        table_row = jnp.where(at.valid, gather(row, at.request), metadata.max_sequences)
        column = gather(first, at.request) + at.rank
        block = ring.peek(before, at.number)
        return allocator.enter(metadata, number, table_row, column, block)

    most = num_fresh.shape[0] * group.max_blocks_per_sequence
    return for_each_entry(num_fresh, min(group.num_blocks, most), reserve, metadata)


class Growing(NamedTuple):
    """The blocks that growing sequences take, and those they give back."""

    number: int
    mapped: jax.Array  # i32[B], blocks before the call
    lacks: tuple[Lack, ...]

    def apply(
        self, metadata: Metadata, step: Step, granted: tuple[Granted, ...]
    ) -> tuple[Metadata, jax.Array]:
        """Map a fresh block for each row that begins one."""
        number, (of_pool,) = self.number, granted
        # First what no row of the step or of a later one sees goes back.
        group, grows = metadata.groups[number], step.query_lengths > 0
        group = tables.give_back(group, step.done.seq_ids, step.length, grows)
        metadata = metadata.with_group(number, group)
        # Each sequence maps its fresh blocks behind those that it has.
        need = jnp.where(step.done.served, of_pool.num, 0)
        num_taken = jnp.sum(need, dtype=jnp.int32)
        row = step.done.rows(metadata)
        if step.is_decoding:  # a block each at most
            opens = jnp.where(need > 0, row, metadata.max_sequences)
            cells = opens, self.mapped, of_pool.before
        else:
            # The rows alone fill so many blocks, and each request begins one more.
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
    """Full blocks that get an owner more, and tails that are copied."""

    number: int
    group: BlockGroup  # as it is before the call
    length: Lengths
    past: sharing.Past
    wrongs: Masks
    lacks: tuple[Lack, ...] = ()

    def judge(self, eligible: jax.Array) -> "Sharing":
        """Count a block for each partly filled tail."""
        need = (eligible & (self.length.tail > 0)).astype(jnp.int32)
        return self._replace(lacks=(Lack.of(self.group, need),))

    def apply(self, metadata: Metadata, done: Done) -> tuple[Metadata, BlockCopies]:
        """Count the new owners of full blocks, and adopt them."""
        number, past, length = self.number, self.past, self.length
        group = metadata.groups[number]
        group = sharing.count_owners(group, past, length, done.served)
        metadata = metadata.with_group(number, group)
        return sharing.adopt(metadata, number, past, length, done)


class Exchanging(NamedTuple):
    """The same, of sequences that give up what they had."""

    number: int
    seq_ids: jax.Array  # i32[B]
    length: Lengths
    past: sharing.Past

    def release(self, metadata: Metadata, served: jax.Array) -> Metadata:
        """Count the new owners of full blocks, and release what sequences had."""
        # In this order a block that only changes hands stays live.
        group = metadata.groups[self.number]
        group = sharing.count_owners(group, self.past, self.length, served)
        mapped = gather(group.num_mapped_blocks, self.seq_ids)
        gap = group.window.gaps_of(self.seq_ids)
        last = jnp.where(served, mapped, 0)
        group = tables.release_kept(group, self.seq_ids, last, gap)
        return metadata.with_group(self.number, group)

    def apply(self, metadata: Metadata, done: Done) -> tuple[Metadata, BlockCopies]:
        """Release, and adopt the parents' blocks."""
        metadata = self.release(metadata, done.served)
        return sharing.adopt(metadata, self.number, self.past, self.length, done)


class Cutting(NamedTuple):
    """Sequences that are cut back, as asked."""

    number: int
    group: BlockGroup  # as it is before the call
    seq_ids: jax.Array  # i32[B]
    lengths: jax.Array  # i32[B]
    wrongs: Masks

    def judge(self, eligible: jax.Array) -> "CutBlocks":
        """Find the block of each request that is cut through, and who has it."""
        group, lengths = self.group, jnp.where(eligible, self.lengths, 0)
        column, tail = tables.locate(lengths, group.block_size)
        is_cut = eligible & (tail > 0)
        block = gather(group.block_tables, (self.seq_ids, column))
        has_others = gather(group.reference_counts, block) > 1
        is_shared = is_cut & has_others
        lack = Lack.of(group, is_shared.astype(jnp.int32))
        return CutBlocks(
            self.number, lengths, column, is_cut, block, is_shared, (lack,)
        )


class CutBlocks(NamedTuple):
    """The block of each of B requests that is cut through."""

    number: int
    lengths: jax.Array  # i32[B], 0 unless eligible
    column: jax.Array  # i32[B], of the block tables
    is_cut: jax.Array  # bool[B], whether there is such a block
    block: jax.Array  # i32[B]
    is_shared: jax.Array  # bool[B], whether it is cut and others have it, too
    lacks: tuple[Lack, ...]

    def apply(self, metadata: Metadata, done: Done) -> tuple[Metadata, BlockCopies]:
        """Release what lies past the end, and give each sequence a tail of its own."""
        number, group = self.number, metadata.groups[self.number]
        copied = self.is_shared & done.served
        kept = tables.num_blocks_for(self.lengths, group.block_size)
        mapped = gather(group.num_mapped_blocks, done.seq_ids)
        # A tail that is copied is released with what lies past the end.
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


class Brought(NamedTuple):
    """What B sequences bring to a group from elsewhere; arrays of the host."""

    block_tables: Any  # i32[B, M] in numbers of their own, M of the cache they enter
    is_first: Any  # bool[B, M], entries that name a block for the first time
    num_given_back: Any  # i32[B], columns without a block between those with one
    num_blocks: Any  # i32[], blocks to be taken; the tables' "not mapped"


class Entering(NamedTuple):
    """Blocks for what sequences bring."""

    number: int
    brought: Brought
    lacks: tuple[Lack, ...]

    def apply(self, metadata: Metadata, row: jax.Array) -> tuple[Metadata, jax.Array]:
        """Map fresh blocks, shared as those brought are among each other."""
        number, brought = self.number, self.brought
        group = metadata.groups[number]
        served, nothing = row < group.max_sequences, group.num_blocks
        mapped = served[:, None] & (brought.block_tables < brought.num_blocks)
        num_taken = jnp.where(jnp.any(served), brought.num_blocks, 0)
        # The blocks are numbered in the order in which they leave the pool.
        metadata, before = allocator.take(metadata, number, num_taken)
        block = jnp.where(mapped, ring.peek(before, brought.block_tables), nothing)
        first = jnp.where(brought.is_first, block, nothing)
        metadata = allocator.forget_taken(metadata, number, first.reshape(-1))

        # No table names these blocks yet: each entry is a reference.
        group = metadata.groups[number]
        mapped = jnp.sum(mapped, axis=1, dtype=jnp.int32) + brought.num_given_back
        metadata = metadata.changed(
            number,
            block_tables=scatter(group.block_tables, row, block),
            num_mapped_blocks=scatter(group.num_mapped_blocks, row, mapped),
            reference_counts=scatter_add(group.reference_counts, block, 1),
            window=group.window.with_gaps(row, brought.num_given_back),
        )
        return metadata, block
