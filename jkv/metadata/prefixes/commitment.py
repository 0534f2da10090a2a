"""Making the blocks that a step filled visible to the prefix index."""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.metadata import allocator
from jkv.metadata.entries import ENTRIES_PER_TRIP, for_each_entry
from jkv.metadata.prefixes import hash_tables, holes
from jkv.metadata.prefixes.columns import (
    Chains,
    Columns,
    CommitLanes,
    describe_blocks,
    find_chains,
    first_lanes,
)
from jkv.metadata.prefixes.prefix_index import forget, index_of
from jkv.sharding.loops import fori_loop, while_loop
from jkv.state import Batch, Metadata, PrefixIndex


def commit_blocks(metadata: Metadata, batch: Batch) -> Metadata:
    """Make the blocks that a step filled visible.

    Args:
      metadata: with an index; the step's keys and values are written.
      batch: the step.
    """
    chains = find_chains(metadata, batch)
    lengths = jnp.zeros_like(chains.first)
    if batch.is_decoding and lengths.shape[0] <= ENTRIES_PER_TRIP:
        metadata, lengths = _commit_one_each(metadata, lengths, chains)
    else:
        metadata, lengths = _commit_runs(metadata, lengths, chains, batch.num_rows)
    visible = jnp.where(
        lengths == chains.num_columns,
        batch.context_lengths,
        (chains.first + lengths) * metadata.block_size,
    )
    row = jnp.where(chains.continues, batch.seq_ids, metadata.max_sequences)
    prefix = index_of(metadata)
    prefix = dataclasses.replace(
        prefix, committed=prefix.committed.at[row].set(visible, mode="drop")
    )
    return dataclasses.replace(metadata, prefix=prefix)


def _commit_one_each(
    metadata: Metadata, lengths: jax.Array, chains: Chains
) -> tuple[Metadata, jax.Array]:
    """Commit a step of one row each, which fills one block of a sequence at most.

    A lane for each request, known at trace time, leaves little to compile. As ever,
    nothing is done where no block is full.
    """
    fills = chains.num_columns > 0
    lanes = CommitLanes(None, jnp.zeros_like(lengths), fills, jnp.ones_like(fills))
    return fori_loop(
        jnp.int32(0),
        jnp.any(fills).astype(jnp.int32),
        lambda _, carry: _commit_lanes(carry[0], carry[1], chains, lanes),
        (metadata, lengths),
    )


def _commit_runs(
    metadata: Metadata, lengths: jax.Array, chains: Chains, num_rows: int
) -> tuple[Metadata, jax.Array]:
    """Commit a step of any rows: each sequence fills a run of blocks."""

    def enter(
        carry: tuple[Metadata, jax.Array],
        _entry: jax.Array,
        request: jax.Array,
        rank: jax.Array,
        valid: jax.Array,
    ) -> tuple[Metadata, jax.Array]:
        metadata, lengths = carry
        unbroken = lengths[request] == rank[first_lanes(rank)]
        lanes = CommitLanes(request, rank, valid, unbroken)
        return _commit_lanes(metadata, lengths, chains, lanes)

    # No batch fills more blocks than its rows have room for, and one each.
    most = lengths.shape[0] + num_rows // metadata.block_size
    return for_each_entry(chains.num_columns, most, enter, (metadata, lengths))


def _commit_lanes(
    metadata: Metadata, lengths: jax.Array, chains: Chains, lanes: CommitLanes
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
    columns = describe_blocks(metadata, chains, lanes)
    asks = _find_fit(metadata, lengths, lanes, columns)
    metadata, answer = hash_tables.insert(
        metadata,
        jnp.where(asks, columns.block, nothing),
        columns.hashes,
        columns.tokens,
        columns.salts,
        columns.owners == 1,
        columns.wide,
    )
    entered = (answer == columns.block) & (answer < nothing)
    parent = columns.before
    if lanes.request is not None:
        parent = jnp.where(columns.is_first, parent, jnp.roll(answer, 1))
    prefix = index_of(metadata)
    child = jnp.where(entered, columns.block, nothing)
    prefix = _note_above(prefix, child, parent, columns.hashes_above)
    prefix, lengths = _prove(prefix, lanes, lengths, answer, parent, entered)
    is_visible = lanes.valid & (lanes.rank < lanes.spread(lengths))
    listed = jnp.where(entered & is_visible, columns.block, nothing)
    prefix = hash_tables.insert_children(prefix, listed, columns.hashes_above)
    metadata = dataclasses.replace(metadata, prefix=prefix)
    return _replace_equal(metadata, columns, answer, is_visible & ~entered), lengths


def _note_above(
    prefix: PrefixIndex, block: jax.Array, parent: jax.Array, above: jax.Array
) -> PrefixIndex:
    """Note what comes before blocks, i32[P]: their parents, or with a window hashes."""
    if prefix.hashes_above is None:
        parents = prefix.parents.at[block].set(parent, mode="drop")
        return dataclasses.replace(prefix, parents=parents)
    hashes = prefix.hashes_above.at[block].set(above, mode="drop")
    return dataclasses.replace(prefix, hashes_above=hashes)


def _find_fit(
    metadata: Metadata, lengths: jax.Array, lanes: CommitLanes, columns: Columns
) -> jax.Array:
    """Return which lanes' blocks may be looked for or entered, bool[P].

    A block that others share may follow other blocks in their rows: it only gives way
    to an equal one. The first block that does neither ends its chain.
    """
    equal = hash_tables.look_up(index_of(metadata), columns.hashes)
    is_fit = (columns.owners == 1) | (equal < metadata.num_blocks)
    is_fit &= jnp.all(columns.tokens >= 0, axis=1)
    if lanes.request is None:
        return lanes.valid & is_fit
    past_end = jnp.iinfo(jnp.int32).max
    bad_rank = jnp.where(lanes.valid & ~is_fit, lanes.rank, past_end)
    ends = jnp.full_like(lengths, past_end).at[lanes.request].min(bad_rank)
    return lanes.valid & lanes.unbroken & (lanes.rank < ends[lanes.request])


def _replace_equal(
    metadata: Metadata, columns: Columns, answer: jax.Array, replaced: jax.Array
) -> Metadata:
    """Put equal blocks, i32[P], in the place of own ones, which go back to the pool."""
    nothing = metadata.num_blocks
    row = jnp.where(replaced, columns.row, metadata.max_sequences)
    tables = metadata.block_tables.at[row, columns.column].set(answer, mode="drop")
    metadata = dataclasses.replace(metadata, block_tables=tables)
    metadata = holes.add_references(metadata, jnp.where(replaced, answer, nothing))
    own = jnp.where(replaced, columns.block, nothing)
    return allocator.drop_references(metadata, own)


def _prove(
    prefix: PrefixIndex,
    lanes: CommitLanes,
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
    if prefix.hashes_above is not None:
        follows = jnp.ones_like(follows)  # its hashes say what it follows

    def is_in(prefix: PrefixIndex) -> jax.Array:
        return prefix.hashes.at[answer].get(mode="fill", fill_value=0) != 0

    if request is None:
        # Nothing relies on the only block of a chain, and one that entered has just
        # been given its parent.
        return prefix, (valid & is_in(prefix) & follows).astype(jnp.int32)

    reach = lengths.at[request].max(jnp.where(valid, rank + 1, 0))
    # A chain that was cut already stays at its length.
    bad_rank = jnp.where(lanes.unbroken, rank, lengths[request])

    def cut(prefix: PrefixIndex) -> jax.Array:
        is_bad = valid & ~(is_in(prefix) & follows)
        return reach.at[request].min(jnp.where(is_bad, bad_rank, past_end))

    def lost(prefix: PrefixIndex, lengths: jax.Array) -> jax.Array:
        return entered & is_in(prefix) & (rank >= lengths[request])

    def round_(state: tuple[PrefixIndex, jax.Array]) -> tuple[PrefixIndex, jax.Array]:
        prefix = forget(state[0], jnp.where(lost(*state), answer, nothing))
        return prefix, cut(prefix)

    return while_loop(
        lambda state: jnp.any(lost(*state)), round_, (prefix, cut(prefix))
    )
