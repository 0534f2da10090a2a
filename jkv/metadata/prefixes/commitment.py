"""Making the blocks that a step filled visible to the prefix index."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import allocator, requests
from jkv.metadata.entries import for_each_entry
from jkv.metadata.prefixes import hashing, prefix_index
from jkv.state import Batch, Metadata, PrefixIndex


class _Chains(NamedTuple):
    """What a commit does for each request of its batch."""

    seq_ids: jax.Array  # i32[B]
    first: jax.Array  # i32[B], the first column to make visible
    salts: jax.Array  # i32[B]


class _Lanes(NamedTuple):
    """The columns one trip of a commit makes visible, request after request."""

    request: jax.Array  # i32[P]
    rank: jax.Array  # i32[P], columns from the request's first one
    valid: jax.Array  # bool[P]
    unbroken: jax.Array  # bool[P], the columns of earlier trips are visible


@jax.jit
def commit_blocks(metadata: Metadata, batch: Batch) -> Metadata:
    prefix = prefix_index.index_of(metadata)
    seq_ids, size = batch.seq_ids, metadata.block_size
    assert batch.epochs is not None, "append stamps its batch if there is an index"
    committed = prefix.committed.at[seq_ids].get(mode="clip")
    current = metadata.context_lengths.at[seq_ids].get(mode="clip")
    # The step must continue what is visible, of the sequence that it was planned for.
    continues = (
        (batch.query_lengths > 0)
        & requests.is_live(metadata, seq_ids)
        & (prefix.epochs.at[seq_ids].get(mode="clip") == batch.epochs)
        & (committed == batch.context_lengths - batch.query_lengths)
        & (batch.context_lengths <= current)
    )
    first = jnp.where(continues, committed // size, 0)
    num_columns = jnp.where(continues, batch.context_lengths // size - first, 0)
    salts = prefix.sequence_salts.at[seq_ids].get(mode="clip")
    chains = _Chains(seq_ids, first, salts)

    def enter(
        carry: tuple[Metadata, jax.Array],
        _entry: jax.Array,
        request: jax.Array,
        rank: jax.Array,
        valid: jax.Array,
    ) -> tuple[Metadata, jax.Array]:
        first_lane = _first_lanes(rank)
        unbroken = carry[1][request] == rank[first_lane]
        return _commit_lanes(*carry, chains, _Lanes(request, rank, valid, unbroken))

    # No batch fills more blocks than its rows have room for, and one each.
    most = seq_ids.shape[0] + batch.num_rows // size
    metadata, lengths = for_each_entry(
        num_columns, most, enter, (metadata, jnp.zeros_like(first))
    )
    visible = jnp.where(
        lengths == num_columns, batch.context_lengths, (first + lengths) * size
    )
    row = jnp.where(continues, seq_ids, metadata.max_sequences)
    prefix = prefix_index.index_of(metadata)
    prefix = dataclasses.replace(
        prefix, committed=prefix.committed.at[row].set(visible, mode="drop")
    )
    return dataclasses.replace(metadata, prefix=prefix)


def _first_lanes(rank: jax.Array) -> jax.Array:
    """Return the lane where the request of each lane begins in this trip, i32[P]."""
    return jnp.maximum(jnp.arange(rank.shape[0], dtype=jnp.int32) - rank, 0)


def _commit_lanes(
    metadata: Metadata, lengths: jax.Array, chains: _Chains, lanes: _Lanes
) -> tuple[Metadata, jax.Array]:
    """Make one full block per lane visible.

    Args:
      metadata: the state.
      lengths: i32[B], columns of each request that earlier trips made visible.
      chains: the requests.
      lanes: the blocks.

    Returns:
      The metadata and the new lengths.
    """
    nothing = metadata.num_blocks
    request, rank, valid = lanes.request, lanes.rank, lanes.valid
    salts = chains.salts[request]
    column = chains.first[request] + rank
    row = jnp.where(valid, chains.seq_ids[request], metadata.max_sequences)

    def mapped(column: jax.Array) -> jax.Array:
        column = jnp.where(column < 0, metadata.max_blocks_per_sequence, column)
        return metadata.block_tables.at[row, column].get(
            mode="fill", fill_value=nothing
        )

    block = mapped(column)
    tokens = prefix_index.tokens_of(metadata).at[block].get(mode="clip")

    # What precedes the first lane of a request is visible; from there hashes are sums.
    first_lane = _first_lanes(rank)
    is_first = first_lane == jnp.arange(rank.shape[0], dtype=jnp.int32)
    before = mapped(column - 1)
    terms = hashing.column_hash(tokens, column)
    sums = jnp.cumsum(terms, dtype=jnp.uint32)
    hashes_before = prefix_index.index_of(metadata).hashes.at[before].get(mode="clip")
    base = jnp.where(column == 0, hashing.salt_hash(salts), hashes_before)
    hashes = (base - sums + terms)[first_lane] + sums
    above = jnp.where(is_first, base, jnp.roll(hashes, 1))

    # A block that others share may follow other blocks in their rows: it only gives
    # way to an equal one. The first block that does neither ends its chain.
    owners = metadata.reference_counts.at[block].get(mode="fill", fill_value=0)
    equal = prefix_index.look_up(prefix_index.index_of(metadata), hashes)
    is_fit = jnp.all(tokens >= 0, axis=1) & ((owners == 1) | (equal < nothing))
    past_end = jnp.iinfo(jnp.int32).max
    ends = jnp.full_like(lengths, past_end)
    ends = ends.at[request].min(jnp.where(valid & ~is_fit, rank, past_end))
    asks = valid & lanes.unbroken & (rank < ends[request])
    metadata, answer = prefix_index.insert(
        metadata, jnp.where(asks, block, nothing), hashes, tokens, salts, owners == 1
    )
    entered = (answer == block) & (answer < nothing)
    parent = jnp.where(is_first, before, jnp.roll(answer, 1))
    prefix = prefix_index.index_of(metadata)
    prefix = dataclasses.replace(
        prefix,
        parents=prefix.parents.at[jnp.where(entered, block, nothing)].set(
            parent, mode="drop"
        ),
    )
    prefix, lengths = _prove(prefix, lanes, lengths, answer, parent, entered)
    is_visible = valid & (rank < lengths[request])
    listed = jnp.where(entered & is_visible, block, nothing)
    prefix = prefix_index.insert_children(prefix, listed, above)
    metadata = dataclasses.replace(metadata, prefix=prefix)

    # An equal block takes the place of the own one, which goes back to the pool.
    replaced = is_visible & ~entered
    tables = metadata.block_tables.at[
        jnp.where(replaced, row, metadata.max_sequences), column
    ].set(answer, mode="drop")
    metadata = dataclasses.replace(metadata, block_tables=tables)
    metadata = allocator.add_references(metadata, jnp.where(replaced, answer, nothing))
    metadata = allocator.drop_references(metadata, jnp.where(replaced, block, nothing))
    return metadata, lengths


def _prove(
    prefix: PrefixIndex,
    lanes: _Lanes,
    lengths: jax.Array,
    answer: jax.Array,
    parent: jax.Array,
    entered: jax.Array,
) -> tuple[PrefixIndex, jax.Array]:
    """Cut each chain where a block's parent is not the block before it.

    Blocks entered past a cut leave the index again, and whatever relied on them is cut
    in turn. That takes more than one round only when hashes collide.

    Returns:
      The index, and i32[B]: the columns of each chain that hold.
    """
    nothing, past_end = prefix.hashes.shape[0], jnp.iinfo(jnp.int32).max
    request, rank, valid = lanes.request, lanes.rank, lanes.valid
    follows = prefix.parents.at[answer].get(mode="clip") == parent
    reach = lengths.at[request].max(jnp.where(valid, rank + 1, 0))
    # A chain that was cut already stays at its length.
    bad_rank = jnp.where(lanes.unbroken, rank, lengths[request])

    def is_in(prefix: PrefixIndex) -> jax.Array:
        return prefix.hashes.at[answer].get(mode="fill", fill_value=0) != 0

    def cut(prefix: PrefixIndex) -> jax.Array:
        is_bad = valid & ~(is_in(prefix) & follows)
        return reach.at[request].min(jnp.where(is_bad, bad_rank, past_end))

    def lost(prefix: PrefixIndex, lengths: jax.Array) -> jax.Array:
        return entered & is_in(prefix) & (rank >= lengths[request])

    def round_(state: tuple[PrefixIndex, jax.Array]) -> tuple[PrefixIndex, jax.Array]:
        prefix = prefix_index.forget(state[0], jnp.where(lost(*state), answer, nothing))
        return prefix, cut(prefix)

    return jax.lax.while_loop(
        lambda state: jnp.any(lost(*state)), round_, (prefix, cut(prefix))
    )
