"""Full blocks of a step, and the prefixes that end with them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import requests, tables
from jkv.operations import gather
from jkv.prefixes import hashing, proofs
from jkv.prefixes.arrays import IndexRow
from jkv.prefixes.hash_tables import Prefixes
from jkv.prefixes.prefix_index import index_of, tokens_of
from jkv.state import Batch, Metadata


class Chains(NamedTuple):
    """Ranges of columns to commit, for each request of a batch."""

    seq_ids: jax.Array  # i32[B]
    continues: jax.Array  # bool[B], True if the step continues the committed tokens
    first: jax.Array  # i32[B], first column to commit
    num_columns: jax.Array  # i32[B]
    rows: IndexRow  # [B], index rows of the sequences


class CommitLanes(NamedTuple):
    """Columns committed in one trip, in request order."""

    request: jax.Array | None  # i32[P]; None: lane i belongs to request i
    rank: jax.Array  # i32[P], column minus the request's first one
    valid: jax.Array  # bool[P]
    unbroken: jax.Array  # bool[P], True if the columns of earlier trips are committed
    is_alone: bool  # static: at most one column per request

    def spread(self, values: jax.Array) -> jax.Array:
        """Repeat the value of each request for its lanes: [B] to [P]."""
        return values if self.request is None else gather(values, self.request)


class Columns(NamedTuple):
    """The leading group's full block of each lane, and the prefix that ends with it."""

    row: jax.Array  # i32[P], table row; S for invalid lanes
    column: jax.Array  # i32[P]
    block: jax.Array  # i32[P]
    prefixes: Prefixes  # [P], keys of the blocks
    owners: jax.Array  # i32[P], reference counts
    hashes_above: jax.Array  # u32[P], of the prefix up to the block's start
    is_first: jax.Array  # bool[P], first lane of its request in this trip
    before: jax.Array  # i32[P], block before the first lane's, N for none


def find_chains(metadata: Metadata, batch: Batch) -> Chains:
    """Find the sequences that continue their committed tokens, and their columns."""
    index, seq_ids, size = index_of(metadata), batch.seq_ids, metadata.block_size
    assert batch.epochs is not None, "append stamps its batch if there is an index"
    rows = index.read(seq_ids)
    committed = rows.committed
    current = gather(metadata.context_lengths, seq_ids)
    continues = (
        (batch.query_lengths > 0)
        & requests.is_live(metadata, seq_ids)
        & (rows.epoch == batch.epochs)
        & (committed == batch.context_lengths - batch.query_lengths)
        & (batch.context_lengths <= current)
    )
    continues &= proofs.has_block_before(metadata, seq_ids, committed // size)
    first = jnp.where(continues, committed // size, 0)
    return Chains(
        seq_ids=seq_ids,
        continues=continues,
        first=first,
        num_columns=jnp.where(continues, batch.context_lengths // size - first, 0),
        rows=rows,
    )


def describe_blocks(metadata: Metadata, chains: Chains, lanes: CommitLanes) -> Columns:
    """Look up the lanes' blocks, and hash the prefixes that end with them."""
    index, group = index_of(metadata), metadata.leading
    salts, column = (
        lanes.spread(chains.rows.salt),
        lanes.spread(chains.first) + lanes.rank,
    )
    row = jnp.where(lanes.valid, lanes.spread(chains.seq_ids), group.max_sequences)
    block = tables.blocks_at(group, row, column)
    before = tables.blocks_at(group, row, column - 1)
    tokens = gather(tokens_of(metadata), block)
    # Blocks before a request's first lane are indexed; later hashes are sums.
    terms = hashing.column_hash(tokens, column)
    hashes_before = gather(index.hashes, before)
    above = jnp.where(column == 0, hashing.salt_hash(salts), hashes_before)
    is_first, first_lane = jnp.ones_like(lanes.valid), None
    if not lanes.is_alone:
        first_lane = first_lanes(lanes.rank)
        is_first = first_lane == jnp.arange(column.shape[0], dtype=jnp.int32)
    hashes = hashing.run_on(above, terms, first_lane)
    if not lanes.is_alone:
        above = jnp.where(is_first, above, jnp.roll(hashes, 1))
    # Only the first block of a run has an indexed parent at this point.
    parents = proofs.known_parents(index, before) if lanes.is_alone else None
    wide = proofs.hash_lanes(index, salts, tokens, column, before, first_lane)
    return Columns(
        row=row,
        column=column,
        block=block,
        prefixes=Prefixes(tokens, salts, hashes, wide, parents),
        owners=gather(group.reference_counts, block, fill=0),
        hashes_above=above,
        is_first=is_first,
        before=before,
    )


def first_lanes(rank: jax.Array) -> jax.Array:
    """Return the first lane of each lane's request in this trip, i32[P]."""
    return jnp.maximum(jnp.arange(rank.shape[0], dtype=jnp.int32) - rank, 0)
