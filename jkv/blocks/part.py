"""Blocks of a pool, as a part of a model (`jkv.metadata.part`)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.blocks import plans, pruning, sharing
from jkv.blocks.swapped import SwappedGroup, fetch_group
from jkv.indexing import gather
from jkv.metadata import allocator, tables
from jkv.metadata.part import Lack, Lengths, Selection
from jkv.state import BlockStorage, Cache, Metadata
from jkv.state.index import Found


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
    ) -> plans.Opening:
        """Count the blocks to reserve, and the cost of the blocks found.

        Blocks found are not taken from the pool, but a cached one stops being free: its
        cost falls on the first request that revives it.
        """
        group, of_group = metadata.groups[self.number], found.groups[self.number]
        size = group.block_size
        total = tables.num_blocks_for(num_tokens, size)
        cached = tables.num_blocks_for(found.num_tokens(size), size)
        fresh = jnp.maximum(
            group.window.to_reserve(total, found.num_blocks, of_group.gap, size),
            cached - found.num_blocks,
        )
        blocks = jnp.where(eligible[:, None], of_group.blocks, group.num_blocks)
        revivals = allocator.find_revivals(group, blocks)
        fresh = jnp.where(eligible, fresh, 0)
        wants = (fresh > 0) | revivals.wants
        lack = Lack.of(group, fresh + revivals.costs, wants)
        return plans.Opening(self.number, found, fresh, (lack,))

    def grow(
        self,
        metadata: Metadata,
        seq_ids: jax.Array,
        new_length: jax.Array,
        eligible: jax.Array,
    ) -> plans.Growing:
        """Count the blocks that `new_length`, i32[B], adds to the mapped ones."""
        group = metadata.groups[self.number]
        mapped = gather(group.num_mapped_blocks, seq_ids)
        blocks = tables.num_blocks_for(new_length, group.block_size)
        need = jnp.where(eligible, jnp.maximum(blocks - mapped, 0), 0)
        return plans.Growing(self.number, mapped, (Lack.of(group, need),))

    def share(
        self, metadata: Metadata, parents: jax.Array, length: Lengths
    ) -> plans.Sharing:
        """Share full blocks, and copy partly filled last blocks."""
        group = metadata.groups[self.number]
        cut_off = group.window.cuts_off(parents, length.tokens, group.block_size)
        past = sharing.find_past(group, parents, length)
        return plans.Sharing(self.number, group, length, past, (cut_off,))

    def cut(
        self, metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
    ) -> plans.Cutting:
        """Release the blocks past the new end; copy a shared last block."""
        group = metadata.groups[self.number]
        cut_off = group.window.cuts_off(seq_ids, lengths, group.block_size)
        return plans.Cutting(self.number, group, seq_ids, lengths, (cut_off,))

    def prune(self, metadata: Metadata, selection: Selection) -> pruning.Pruning:
        """Move whole blocks, and copy the rows of others."""
        return pruning.Pruning.of(metadata, self.number, selection)

    def enter(
        self, metadata: Metadata, brought: dict[int, plans.Brought]
    ) -> plans.Entering:
        """Take as many blocks as the swapped-in sequences have."""
        own = brought[self.number]
        lack = Lack.of(metadata.groups[self.number], own.num_blocks[None])
        return plans.Entering(self.number, own, (lack,))

    def exchange(
        self,
        metadata: Metadata,
        seq_ids: jax.Array,
        parents: jax.Array,
        length: Lengths,
    ) -> plans.Exchanging:
        """Release the old blocks, share the parents' full ones, copy their tails."""
        past = sharing.find_past(metadata.groups[self.number], parents, length)
        return plans.Exchanging(self.number, seq_ids, length, past)

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
