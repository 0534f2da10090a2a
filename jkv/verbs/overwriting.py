"""overwrite, scrub: patch stored keys and values, and zero what nothing refers to."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.blocks.pruning import Pruning
from jkv.blocks.row_copies import RowCopies, copy_rows
from jkv.metadata import requests, tables
from jkv.metadata.part import Selection, Served
from jkv.metadata.requests import Integer, Integers
from jkv.operations import divide, gather, running_sum, scatter, scatter_max
from jkv.sharding.storage_sharding import POOL, DividedAxes, divided, over_devices
from jkv.state import (
    Batch,
    BlockGroup,
    BlockStorage,
    Cache,
    Metadata,
    StateStorage,
)
from jkv.state.entry import locate_layer, takes_cache
from jkv.state.observed import ObservedQueries
from jkv.status import Status
from jkv.verbs.pruning import stop_commits
from jkv.verbs.writing import write


@takes_cache()
def overwrite(
    cache: Cache,
    layer: Integer,
    seq_ids: Integers,
    positions: Integers,
    keys: jax.Array,
    values: jax.Array | None = None,
) -> tuple[Cache, jax.Array]:
    """Replace stored keys and values of one layer, for patching and ablations.

    Only the named sequences change. A block shared with other sequences is copied
    first, in all layers of its group. A block that is in the prefix index leaves it
    with the blocks behind it; a shared one stays there, and the sequence gets copies of
    its blocks behind it, too. The sequence commits nothing further until it is
    truncated to 0 or freed, because its tokens no longer determine its keys. Rows are
    encoded as by `write`. Outside jit this copies the whole storage: jit and donate.

    Args:
      cache: the cache.
      layer: i32[] or int; may be traced.
      seq_ids: i32[R] or int, the sequence of each row; -1 is padding. Ids may repeat.
      positions: i32[R] or int, cached tokens of the sequences, as for `read`: slots in
        a pruned sequence.
      keys: [R, K, D], any float dtype.
      values: [R, K, Dv]. `None` for a cache with `values_in_keys`.

    Returns:
      The new cache and i32[R] of `Status`: OK, INVALID_SEQUENCE, INVALID_ARGUMENT (a
      position below 0, at or past the context length, released by a sliding window, or
      named by an earlier row) or OUT_OF_BLOCKS (no free block for a copy; then all rows
      of the sequence are refused). The contents of refused rows stay.

    Raises:
      ValueError: for rows of a wrong shape or dtype, or a `layer` out of range or
        without blocks.
      NotImplementedError: if the cache is sharded over a context axis.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0])
      >>> cache, batch = jkv.append(cache, [0], [2], capacity=2)
      >>> rows = jnp.ones((2, 1, 8))
      >>> cache = jkv.write(cache, 0, batch, rows, rows)
      >>> cache, forked = jkv.fork(cache, [0])
      >>> cache, status = jkv.overwrite(cache, 0, 1, 0, 5 * rows[:1], rows[:1])
      >>> [jkv.read(cache, 0, i)[0][:2, 0, 0].tolist() for i in (0, 1)]
      [[1.0, 1.0], [5.0, 1.0]]
    """
    found = locate_layer(cache, layer)
    seq_ids, positions = requests.broadcast(seq_ids=seq_ids, positions=positions)
    number, storage = found.group, cache.storage[found.group]
    if storage.sharding is not None and storage.sharding.context is not None:
        raise NotImplementedError(
            f"overwrite does not support a cache sharded over context="
            f"{storage.sharding.context!r}; shard it over heads"
        )
    metadata, owned = _own(
        cache.metadata, jnp.asarray(seq_ids), jnp.asarray(positions), number=number
    )
    batch = Batch(is_decoding=True, sizes=cache.sizes, **owned.fields)
    if len(seq_ids) == 0:
        return cache, batch.status
    storage = copy_rows(storage, owned.copies, cache.layers_of(number))
    cache = cache.with_metadata(metadata).with_group_storage(number, storage)
    return write(cache, layer, batch, keys, values), batch.status


class _Owned(NamedTuple):
    """Rows in blocks that only their sequence has."""

    fields: dict[str, Any]  # of a `Batch` with a request for each row
    copies: RowCopies


@functools.partial(jax.jit, static_argnames="number")
def _own(
    metadata: Metadata, seq_ids: jax.Array, positions: jax.Array, *, number: int
) -> tuple[Metadata, _Owned]:
    """Give the sequences of R rows blocks of their own in one group."""
    group, num_rows = metadata.groups[number], seq_ids.shape[0]
    padding = requests.is_padding(seq_ids)
    before = metadata.sequences.read(seq_ids)
    live = requests.is_open(metadata, seq_ids, before)
    length = jnp.where(live, before.context_length, 0)
    column, offset = divide(jnp.clip(positions, 0, length), group.block_size)
    row = jnp.where(live, seq_ids, metadata.max_sequences)
    wrong = (positions < 0) | (positions >= length) | _repeats(seq_ids, positions)
    wrong |= tables.blocks_at(group, row, column) >= group.num_blocks
    causes = [(Status.INVALID_SEQUENCE, ~live), (Status.INVALID_ARGUMENT, wrong)]
    status = requests.find_status(padding, causes)
    eligible = (status == Status.OK) & ~padding

    # A request of the plan for each sequence, in the order of its first row.
    num_lanes = min(num_rows, metadata.max_sequences)
    is_first = live & requests.is_first_mention(metadata, seq_ids)
    rank = jnp.where(is_first, running_sum(is_first.astype(jnp.int32)) - 1, num_lanes)
    nobody = jnp.full((num_lanes,), metadata.max_sequences, jnp.int32)
    lane_ids = scatter(nobody, rank, seq_ids)
    lane_of = jnp.zeros((metadata.max_sequences,), jnp.int32)
    lane_of = scatter(lane_of, lane_ids, jnp.arange(num_lanes, dtype=jnp.int32))
    lane = jnp.where(eligible, gather(lane_of, row), num_lanes)
    rewritten = jnp.zeros((num_lanes, group.max_blocks_per_sequence), bool)
    rewritten = scatter(rewritten, (lane, column), True)
    is_changed = jnp.any(rewritten, axis=1)
    # Reserved blocks stay, too.
    room = gather(group.num_mapped_blocks, lane_ids, fill=0) * group.block_size
    selection = Selection(lane_ids, room, {}, room, False, rewritten)
    plan = Pruning(number, metadata, selection, ()).judge(is_changed)
    no_block = requests.agree([plan.lacks]).no_block
    lacks = eligible & gather(no_block, lane)
    status = jnp.where(lacks, jnp.int32(Status.OUT_OF_BLOCKS), status)

    done = Served(is_changed & ~no_block, lane_ids)
    metadata, copies = plan.apply(metadata, done)
    of_lanes = done.rows(metadata)
    metadata = stop_commits(metadata, of_lanes, lane_ids)
    metadata = requests.mark_used(metadata, of_lanes, metadata.sequences.read(lane_ids))
    served = eligible & ~lacks
    metadata = requests.settle(metadata, status, served)
    row = jnp.where(served, seq_ids, metadata.max_sequences)
    block = tables.blocks_at(metadata.groups[number], row, column)
    start = jnp.arange(num_rows, dtype=jnp.int32)
    fields = dict(
        seq_ids=seq_ids,
        status=status,
        query_starts=start,
        query_lengths=served.astype(jnp.int32),
        context_lengths=length,
        positions=jnp.where(served, positions, 0),
        valid=served,
        offsets=jnp.where(served, offset, 0),
        blocks_of_groups=tuple(
            block if i == number else None for i in range(len(metadata.groups))
        ),
        epochs=None,
    )
    return metadata, _Owned(fields, copies)


def _repeats(seq_ids: jax.Array, positions: jax.Array) -> jax.Array:
    """Return True for rows that an earlier row of the call names, bool[R]."""
    order = jnp.lexsort((positions, seq_ids))  # stable
    ids, at = seq_ids[order], positions[order]
    same = (ids[1:] == ids[:-1]) & (at[1:] == at[:-1])
    return jnp.zeros(seq_ids.shape, bool).at[order[1:]].set(same)


@takes_cache()
def scrub(cache: Cache) -> Cache:
    """Zero all keys, values and states that no sequence and no cached block holds.

    For audits, and for pools that several users share: freed blocks keep their contents
    until they are written again. Zeroed are the slots that no block table and no entry
    of the prefix index names, in every layer with its scales, including slots past a
    sequence's context length; their recorded tokens; and the states, pending inputs and
    observed queries of closed sequences. `clear_prefixes` and then `scrub` leave only
    open sequences. A pass over all storage: in place under jit with donation.

    Args:
      cache: the cache; no step may be between its `append` and its last `write`.

    Returns:
      The cache with the same sequences and prefixes.

    Raises:
      NotImplementedError: for a group of another kind than blocks and states.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0])
      >>> cache, batch = jkv.append(cache, [0], [1])
      >>> rows = jnp.ones((1, 1, 8))
      >>> cache, _ = jkv.free(jkv.write(cache, 0, batch, rows, rows), 0)
      >>> [int((each.storage[0].key_pool != 0).sum()) for each in
      ...     (cache, jkv.scrub(cache))]
      [8, 0]
    """
    metadata = cache.metadata
    storage = list(cache.storage)
    for number, of_group in enumerate(storage):
        if isinstance(of_group, StateStorage):
            storage[number] = of_group.with_arrays(
                _zero_states(metadata, of_group.arrays)
            )
            continue
        if not isinstance(of_group, BlockStorage):
            raise NotImplementedError(
                f"scrub does not support groups of kind {of_group.kind!r}"
            )
        group, is_named = _forget_contents(metadata, number=number)
        metadata = metadata.with_group(number, group)
        if of_group.num_layers:
            zero = over_devices(of_group.sharding, _zero_slots, _Slots, POOL)
            slots = _Slots(arrays=of_group.arrays, is_named=is_named)
            storage[number] = of_group.with_arrays(zero(slots))
    return cache.with_metadata(metadata).with_storage(tuple(storage))


@functools.partial(jax.jit, static_argnames="number")
def _forget_contents(
    metadata: Metadata, *, number: int
) -> tuple[BlockGroup, jax.Array]:
    """Forget tokens and queries that nothing names; return also the named slots.

    The slots, bool[N, T], are those of the tokens in block tables and of indexed
    blocks.
    """
    group = metadata.groups[number]
    size, num_blocks = group.block_size, group.num_blocks
    column = jnp.arange(group.max_blocks_per_sequence, dtype=jnp.int32)[None]
    lengths = jnp.where(metadata.is_open, metadata.context_lengths, 0)[:, None]
    filled = jnp.clip(lengths - column * size, 0, size)
    num_named = jnp.zeros((num_blocks,), jnp.int32)
    num_named = scatter_max(num_named, group.block_tables, filled)
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    is_known = metadata.index.knows(metadata, number, block)
    num_named = jnp.where(is_known, size, num_named)
    is_named = jnp.arange(size, dtype=jnp.int32)[None] < num_named[:, None]
    if group.tokens is not None:
        tokens = jnp.where(is_named, group.tokens, -1)
        group = dataclasses.replace(group, tokens=tokens)
    if isinstance(group.observed, ObservedQueries):
        queries = _keep(group.observed.queries, metadata.is_open)
        observed = dataclasses.replace(group.observed, queries=queries)
        group = dataclasses.replace(group, observed=observed)
    return group, is_named


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Slots:
    """The arrays of a group, each field with its sharding over devices."""

    # By name, [L, N, K, T, ...].
    arrays: dict[str, jax.Array] = dataclasses.field(metadata=divided(POOL))
    # bool[N, T]
    is_named: jax.Array = dataclasses.field(metadata=divided(DividedAxes(tokens=1)))


@jax.jit
def _zero_slots(operands: _Slots) -> dict[str, jax.Array]:
    """Zero the slots that are not named."""
    named = operands.is_named[None, :, None]

    def zero(array: jax.Array) -> jax.Array:
        mask = named.reshape(named.shape + (1,) * (array.ndim - named.ndim))
        return jnp.where(mask, array, jnp.zeros((), array.dtype))

    return {name: zero(array) for name, array in operands.arrays.items()}


@jax.jit
def _zero_states(
    metadata: Metadata, arrays: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Zero the states of closed sequences, and snapshots without a prefix."""
    kept = {
        "rows": metadata.is_open,
        "inputs": metadata.is_open,
        "snapshot_rows": metadata.index.used_snapshots(),
        "snapshot_inputs": metadata.index.used_snapshots(),
    }
    return {
        path: array if path == "bases" else _keep(array, kept[path.split(".")[0]])
        for path, array in arrays.items()
    }


def _keep(array: jax.Array, is_kept: jax.Array) -> jax.Array:
    """Zero the rows of an array, [L, P, ...], that are not kept, bool[P]."""
    mask = is_kept.reshape((1, -1) + (1,) * (array.ndim - 2))
    return jnp.where(mask, array, jnp.zeros((), array.dtype))
