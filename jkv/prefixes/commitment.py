"""Commit: add the blocks that a step filled to the prefix index."""

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jkv.metadata import allocator, tables
from jkv.metadata.part import Moves, parts_of
from jkv.operations import (
    MOST_COMPARED,
    Entries,
    find_equals,
    for_each_entry,
    fori_loop,
    gather,
    scatter,
    while_loop,
)
from jkv.prefixes import hash_tables, prefix_index, proofs, snapshots
from jkv.prefixes.arrays import IndexArrays
from jkv.prefixes.columns import (
    Chains,
    Columns,
    CommitLanes,
    describe_blocks,
    find_chains,
    first_lanes,
)
from jkv.prefixes.prefix_index import index_of, put_index
from jkv.state import Batch, BlockGroup, Metadata


@jax.jit
def commit_step(metadata: Metadata, batch: Batch) -> tuple[Metadata, tuple[Moves, ...]]:
    """Index the blocks that a step filled, and choose snapshots to write.

    The step's keys and values are written. Return the metadata and the snapshots to
    copy, by part; () without snapshots.
    """
    metadata, continues = _commit_blocks(metadata, batch)
    if snapshots.snapshots_of(metadata) is None:
        return metadata, ()
    metadata, snapshot_ids = snapshots.make(metadata, batch, continues)
    parts = parts_of(metadata)
    return metadata, tuple(part.keep(batch.seq_ids, snapshot_ids) for part in parts)


def _commit_blocks(metadata: Metadata, batch: Batch) -> tuple[Metadata, jax.Array]:
    """Index the blocks that a step filled; return the continuing requests."""
    chains = find_chains(metadata, batch)
    start = metadata, jnp.zeros_like(chains.first)
    if not metadata.block_numbers:  # no blocks: recorded tokens are committed
        lengths = chains.num_columns
    elif batch.is_decoding and len(batch.seq_ids) <= MOST_COMPARED:
        metadata, lengths = _commit_one_each(start, chains)
    else:
        metadata, lengths = _commit_runs(start, chains, batch)
    visible = jnp.where(
        lengths == chains.num_columns,
        batch.context_lengths,
        (chains.first + lengths) * metadata.block_size,
    )
    row = jnp.where(chains.continues, batch.seq_ids, metadata.max_sequences)
    index = index_of(metadata).write(row, chains.rows._replace(committed=visible))
    return put_index(metadata, index), chains.continues


# The metadata, and i32[B]: committed columns of each request.
_Carry: TypeAlias = tuple[Metadata, jax.Array]


def _commit_one_each(start: _Carry, chains: Chains) -> _Carry:
    """Commit a step of one row each, which fills at most one block per sequence.

    A static lane per request keeps the program small. Without full blocks the loop has
    no trips.
    """
    fills = chains.num_columns > 0

    # The trip number is the rank. It is unknown at compile time, so XLA does not hoist
    # computations on ranks into kernels of their own.
    def trip(rank: jax.Array, carry: _Carry) -> _Carry:
        ranks = jnp.broadcast_to(rank, fills.shape)
        lanes = CommitLanes(None, ranks, fills, jnp.ones_like(fills), True)
        return _commit_lanes(*carry, chains, lanes)

    num_trips = jnp.any(fills).astype(jnp.int32)
    return fori_loop(jnp.int32(0), num_trips, trip, start)


def _commit_runs(start: _Carry, chains: Chains, batch: Batch) -> _Carry:
    """Commit a step of any rows: each sequence fills a run of blocks."""

    def enter(carry: _Carry, at: Entries) -> _Carry:
        metadata, lengths = carry
        unbroken = gather(lengths, at.request) == gather(at.rank, first_lanes(at.rank))
        lanes = CommitLanes(*at[1:], unbroken, batch.is_decoding)
        return _commit_lanes(metadata, lengths, chains, lanes)

    # A batch fills at most the blocks of its rows alone, and one more per request; with
    # one row per request only the latter.
    most = len(batch.seq_ids)
    if not batch.is_decoding:
        most += batch.num_rows // start[0].block_size
    return for_each_entry(chains.num_columns, most, enter, start, MOST_COMPARED)


def _commit_lanes(
    metadata: Metadata, lengths: jax.Array, chains: Chains, lanes: CommitLanes
) -> _Carry:
    """Index one full block per lane after the columns committed, i32[B]."""
    nothing = metadata.leading.num_blocks
    columns = describe_blocks(metadata, chains, lanes)
    asks = _find_fit(metadata, lengths, lanes, columns)
    resolved = hash_tables.resolve(
        metadata,
        jnp.where(asks, columns.block, nothing),
        columns.prefixes,
        columns.hashes_above,
        columns.owners == 1,
    )
    stands, parent = resolved.stands, columns.before
    if not lanes.is_alone:
        parent = jnp.where(columns.is_first, parent, jnp.roll(stands, 1))
    index = hash_tables.enter(
        index_of(metadata), resolved, columns.prefixes, parent, columns.hashes_above
    )
    index, lengths = _prove(index, lanes, lengths, resolved, parent)
    is_visible = lanes.valid & (lanes.rank < lanes.spread(lengths))
    metadata = put_index(metadata, index)

    group, own = metadata.leading, columns.block
    group = _exchange(group, columns, own, stands, is_visible & (stands != own))
    metadata = metadata.with_group(metadata.leader, group)
    visible, is_new = jnp.where(is_visible, stands, nothing), resolved.enters < nothing
    for number in metadata.followers:
        metadata = _pair_blocks(metadata, number, columns, visible, is_new)
    return metadata, lengths


def _find_fit(
    metadata: Metadata, lengths: jax.Array, lanes: CommitLanes, columns: Columns
) -> jax.Array:
    """Return the lanes whose blocks may be looked up or indexed, bool[P].

    The prefix of a shared block may differ among its rows: it is only replaced by an
    equal one, indexed before or by an earlier lane. The first shared block without an
    equal, or with unrecorded tokens, ends its chain.
    """
    is_known = lanes.valid & jnp.all(columns.prefixes.tokens >= 0, axis=1)
    if lanes.is_alone:  # no block follows, and `resolve` handles shared ones
        return is_known
    hashes, past_end = columns.prefixes.hashes, jnp.iinfo(jnp.int32).max
    lane = jnp.arange(is_known.shape[0], dtype=jnp.int32)
    equal = hash_tables.look_up(index_of(metadata), hashes)
    is_alone = columns.owners == 1
    is_fit = is_alone | (equal < metadata.leading.num_blocks)

    def in_chains(is_fit: jax.Array) -> jax.Array:
        bad_rank = jnp.where(lanes.valid & ~(is_known & is_fit), lanes.rank, past_end)
        ends = jnp.full_like(lengths, past_end).at[lanes.request].min(bad_rank)
        return lanes.valid & lanes.unbroken & (lanes.rank < lanes.spread(ends))

    # An indexed block may have equals in later lanes, whose successors may then enter.
    # Trips occur only if full blocks of the step were shared.
    def round_(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        asks, _ = state
        first = find_equals(hashes, asks & is_alone).first
        more = in_chains(is_fit | (first < lane))
        return more, jnp.any(more & ~asks)

    return while_loop(
        lambda state: state[1],
        round_,
        (in_chains(is_fit), jnp.any(is_known & ~is_fit)),
    )[0]


def _prove(
    index: IndexArrays,
    lanes: CommitLanes,
    lengths: jax.Array,
    resolved: hash_tables.Resolved,
    parent: jax.Array,
) -> tuple[IndexArrays, jax.Array]:
    """End each chain before a block whose indexed parent is not the preceding block.

    Blocks indexed past this point leave the index, and chains that relied on them end
    as well, which takes more than one round only if hashes collide. Return the index
    and the valid columns of each chain, i32[B].
    """
    nothing, past_end = index.hashes.shape[0], jnp.iinfo(jnp.int32).max
    request, rank, valid = lanes.request, lanes.rank, lanes.valid
    stands, entered = resolved.stands, resolved.enters < nothing
    # The parent of a single block was compared, and no block relies on it.
    if request is None or lanes.is_alone:
        num = (stands < nothing).astype(jnp.int32)
        return index, num if request is None else lengths.at[request].max(num)
    follows = proofs.follows(index, stands, parent)

    def is_in(index: IndexArrays) -> jax.Array:
        return gather(index.hashes, stands, fill=0) != 0

    reach = lengths.at[request].max(jnp.where(valid, rank + 1, 0))
    # A chain that ended in an earlier trip keeps its length.
    bad_rank = jnp.where(lanes.unbroken, rank, gather(lengths, request))

    def cut(index: IndexArrays) -> jax.Array:
        is_bad = valid & ~(is_in(index) & follows)
        return reach.at[request].min(jnp.where(is_bad, bad_rank, past_end))

    def lost(index: IndexArrays, lengths: jax.Array) -> jax.Array:
        return entered & is_in(index) & (rank >= gather(lengths, request))

    def round_(state: tuple[IndexArrays, jax.Array]) -> tuple[IndexArrays, jax.Array]:
        gone = jnp.where(lost(*state), stands, nothing)
        hashes = scatter(state[0].hashes, gone, jnp.uint32(0))
        index = dataclasses.replace(state[0], hashes=hashes)
        return index, cut(index)

    return while_loop(lambda state: jnp.any(lost(*state)), round_, (index, cut(index)))


def _pair_blocks(
    metadata: Metadata,
    number: int,
    columns: Columns,
    leaders: jax.Array,  # i32[P], leader blocks of columns, N_0 if not committed
    entered: jax.Array,  # bool[P], True if just indexed
) -> Metadata:
    """Pair a group's blocks with equal contents with the leader's blocks.

    An existing partner replaces a sequence's own block, as equal blocks of the leading
    group do. Of several new ones the first is kept. Blocks outside the window get no
    partner until a sequence that still has them commits the same tokens.
    """
    group, no_leader = metadata.groups[number], metadata.leading.num_blocks
    is_visible, nothing = leaders < no_leader, group.num_blocks
    row = jnp.where(is_visible, columns.row, group.max_sequences)
    own = tables.blocks_at(group, row, columns.column)

    anew = jnp.where(entered & is_visible, leaders, no_leader)
    metadata = prefix_index.forget_partners(metadata, number, anew)
    known = prefix_index.find_partners(metadata, number, leaders)

    offered = (own < nothing) & (known == nothing)
    first = find_equals(leaders, offered).first
    lane = jnp.arange(own.shape[0], dtype=jnp.int32)
    chosen = offered & (first == lane)
    leader, partner = (
        jnp.where(chosen, ids, none)
        for ids, none in ((leaders, no_leader), (own, nothing))
    )
    metadata = prefix_index.set_partners(metadata, number, leader, partner)

    new = gather(own, first, fill=nothing)
    other = jnp.where(known < nothing, known, new)
    replaced = (own < nothing) & (other < nothing) & (other != own)
    group = _exchange(group, columns, own, other, replaced)
    return metadata.with_group(number, group)


def _exchange(
    group: BlockGroup,
    columns: Columns,
    own: jax.Array,
    other: jax.Array,
    replaced: jax.Array,
) -> BlockGroup:
    """Replace own blocks, i32[P], by equal indexed ones where bool[P]."""
    nothing = group.num_blocks
    row = jnp.where(replaced, columns.row, group.max_sequences)
    block_tables = scatter(group.block_tables, (row, columns.column), other)
    group = dataclasses.replace(group, block_tables=block_tables)
    own, other = (jnp.where(replaced, block, nothing) for block in (own, other))
    return allocator.exchange_references(group, own, other)
