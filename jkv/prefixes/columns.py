"""The full blocks that a step filled, and the prefixes that they end."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.indexing import gather
from jkv.metadata import requests, tables
from jkv.prefixes import hashing, proofs
from jkv.prefixes.arrays import IndexRow
from jkv.prefixes.hash_tables import Prefixes
from jkv.prefixes.prefix_index import index_of, tokens_of
from jkv.state import Batch, Metadata


class Chains(NamedTuple):
    """What a commit does for each request of its batch."""

    seq_ids: jax.Array  # i32[B]
    continues: jax.Array  # bool[B], whether the step may become visible
    first: jax.Array  # i32[B], the first column to make visible
    num_columns: jax.Array  # i32[B]
    rows: IndexRow  # [B], of the sequences


class CommitLanes(NamedTuple):
    """The columns one trip of a commit makes visible, request after request."""

    request: jax.Array | None  # i32[P]; None: lane i is of request i
    rank: jax.Array  # i32[P], columns from the request's first one
    valid: jax.Array  # bool[P]
    unbroken: jax.Array  # bool[P], the columns of earlier trips are visible
    is_alone: bool  # static: each request has one column at most

    def spread(self, values: jax.Array) -> jax.Array:
        """Give each lane the value of its request: [B] to [P]."""
        return values if self.request is None else gather(values, self.request)


class Columns(NamedTuple):
    """The full block of each lane, of the leading group, and the prefix it ends."""

    row: jax.Array  # i32[P], of the tables; S where the lane is not valid
    column: jax.Array  # i32[P]
    block: jax.Array  # i32[P]
    prefixes: Prefixes  # [P], what the block holds
    owners: jax.Array  # i32[P], table entries that name the block
    hashes_above: jax.Array  # u32[P], of the prefix up to the block's beginning
    is_first: jax.Array  # bool[P], the first lane of its request in this trip
    before: jax.Array  # i32[P], the block before the first lane's, N for none


def find_chains(metadata: Metadata, batch: Batch) -> Chains:
    """Find which sequences go on with what is visible of them, and where."""
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
    """Look up the lanes' blocks, and hash the prefixes that they end."""
    index, group = index_of(metadata), metadata.leading
    salts, column = (
        lanes.spread(chains.rows.salt),
        lanes.spread(chains.first) + lanes.rank,
    )
    row = jnp.where(lanes.valid, lanes.spread(chains.seq_ids), group.max_sequences)
    block = tables.blocks_at(group, row, column)
    before = tables.blocks_at(group, row, column - 1)
    tokens = gather(tokens_of(metadata), block)
    # What precedes the first lane of a request is visible; from there hashes are sums.
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
    # Of a run's blocks only the first has its parent in the index before they enter.
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
    """Return the lane where the request of each lane begins in this trip, i32[P]."""
    return jnp.maximum(jnp.arange(rank.shape[0], dtype=jnp.int32) - rank, 0)
