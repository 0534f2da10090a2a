"""keep_rows: keep some of a step's rows, such as one path of a tree."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.metadata import requests
from jkv.metadata.observations import forget_queries
from jkv.operations import gather, scatter
from jkv.sharding.storage_sharding import POOL, divided, over_devices
from jkv.state import NO_SEQUENCE, Batch, BlockStorage, Cache, Metadata, Slots
from jkv.state.entry import check_batch, takes_cache
from jkv.status import Status
from jkv.verbs.branching import truncate


@takes_cache()
def keep_rows(
    cache: Cache, batch: Batch, rows: jax.Array
) -> tuple[Cache, Batch, jax.Array]:
    """Keep the listed rows of each request in a step, and drop the others.

    The kept rows are packed after the tokens from before the step, in all layers, with
    their recorded tokens; the rest is dropped as by `truncate`. Use it after a tree of
    draft tokens was verified. It needs no block that `truncate` would not.

    Args:
      cache: the cache, with the step written.
      batch: the newest step of its sequences.
      rows: i32[B, P], ascending indices of rows within their request, -1 after the
        last; all -1 drops the whole step.

    Returns:
      The new cache; the batch of the kept rows as a causal step, for `commit`; and
      i32[B] of `Status`: OK, INVALID_ARGUMENT (other rows, or a sequence that changed
      since; nothing is changed) or OUT_OF_BLOCKS.

    Raises:
      ValueError: on a cache with recurrent-state layers, for an array of another shape,
        or a batch of another cache or of `peek`.
      NotImplementedError: on a mesh with a context axis.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0])
      >>> tree = jkv.TreeMask(jnp.array([-1, 0, 0]))
      >>> cache, batch = jkv.append(cache, opened.seq_ids, 3, capacity=3, mask=tree)
      >>> cache, path, status = jkv.keep_rows(cache, batch, jnp.array([[0, 2]]))
      >>> path.query_lengths.tolist(), int(jkv.context_lengths(cache)[0])
      ([2], 2)
    """
    check_batch(cache, batch)
    expect("rows", rows, "B P", {"B": len(batch.seq_ids)}, jnp.integer)
    if None in batch.blocks_of_groups:
        raise ValueError(
            "keep_rows needs layers with blocks only, this cache has recurrent-state "
            "layers, whose states follow all rows; use truncate"
        )
    if batch.mask is not None and batch.mask.reads_only:
        raise ValueError("batch must come from append, got a batch of peek")
    shardings = [storage.sharding for storage in cache.storage]
    if any(each is not None and each.context is not None for each in shardings):
        raise NotImplementedError(
            "keep_rows is not supported on a mesh with a context axis, where a row "
            "would move between devices"
        )
    plan = _plan(cache.metadata, batch, jnp.asarray(rows, jnp.int32))
    metadata, storage = cache.metadata, list(cache.storage)
    for number, (source, target) in enumerate(plan.moves):
        storage[number] = _move_rows(storage[number], source, target)
        tokens = metadata.groups[number].tokens
        if tokens is not None:
            tokens = scatter(tokens, tuple(target), gather(tokens, tuple(source)))
            metadata = metadata.changed(number, tokens=tokens)
    cache = cache.with_metadata(metadata).with_storage(tuple(storage))
    ids = jnp.where(plan.is_wrong, NO_SEQUENCE, batch.seq_ids)
    ids = jnp.where(batch.query_lengths > 0, ids, NO_SEQUENCE)
    cache, status = truncate(cache, ids, plan.start + plan.num_kept)
    status = jnp.where(plan.is_wrong, jnp.int32(Status.INVALID_ARGUMENT), status)
    if any(group.observed.width for group in metadata.block_groups):
        is_kept = (status == Status.OK) & (batch.query_lengths > 0)
        metadata = _forget_moved(cache.metadata, batch, plan.start, rows, is_kept)
        cache = cache.with_metadata(metadata)
    epochs = cache.metadata.index.epochs_of(batch.seq_ids)
    return cache, _as_step(batch, plan, status, epochs), status


class _Plan(NamedTuple):
    """The rows to keep, and where they go."""

    start: jax.Array  # i32[B], tokens before the step
    num_kept: jax.Array  # i32[B]
    is_wrong: jax.Array  # bool[B]
    # By group, slots of B * P rows, of blocks N and above for none.
    moves: tuple[tuple[Slots, Slots], ...]


@jax.jit
def _plan(metadata: Metadata, batch: Batch, rows: jax.Array) -> _Plan:
    """Check the rows of each request, and find the slots that they move between."""
    lengths, width = batch.query_lengths, rows.shape[1]
    listed = rows >= 0
    count = jnp.sum(listed, axis=1, dtype=jnp.int32)
    place = jnp.arange(width, dtype=jnp.int32)[None]
    before = jnp.pad(rows[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    is_bad = listed & ((rows >= lengths[:, None]) | (rows <= before))
    is_bad |= listed != (place < count[:, None])
    is_wrong = is_bad.any(axis=1)

    # The sequence must not have changed, nor share or have indexed the step's blocks.
    start = batch.context_lengths - lengths
    current = gather(metadata.context_lengths, batch.seq_ids)
    has_rows, moves = lengths > 0, (listed & (rows != place)).any(axis=1)
    is_wrong |= has_rows & (current != batch.context_lengths)
    is_wrong |= has_rows & ~requests.is_live(metadata, batch.seq_ids)
    epochs = metadata.index.epochs_of(batch.seq_ids)
    if epochs is not None and batch.epochs is not None:
        is_wrong |= has_rows & (epochs != batch.epochs)
    indexed = metadata.index.leave(batch.seq_ids)
    if indexed is not None:
        is_wrong |= moves & (indexed[0] > start)
    first_row = batch.query_starts[:, None]
    for number in metadata.block_numbers:
        group = metadata.groups[number]
        block = _slots_of(batch, number, first_row + place, listed).block_ids
        is_shared = gather(group.reference_counts, block, fill=1) != 1
        is_wrong |= moves & is_shared.any(axis=1)

    moved = listed & moves[:, None] & ~is_wrong[:, None]

    def cells(number: int, row: jax.Array) -> Slots:
        slots = _slots_of(batch, number, row, moved)
        return Slots(*(each.reshape(-1) for each in slots))

    pairs = [
        (cells(number, first_row + rows), cells(number, first_row + place))
        for number in metadata.block_numbers
    ]
    return _Plan(start, count, is_wrong, tuple(pairs))


def _slots_of(batch: Batch, number: int, row: jax.Array, valid: jax.Array) -> Slots:
    """Return the slots of rows of the batch, with block N or above for none."""
    block_ids, offsets = batch.slots_of(number)
    nothing = jnp.iinfo(jnp.int32).max
    block_ids = jnp.where(valid, gather(block_ids, row, fill=nothing), nothing)
    return Slots(block_ids, gather(offsets, row))


def _forget_moved(
    metadata: Metadata,
    batch: Batch,
    start: jax.Array,  # i32[B], tokens before the step
    rows: jax.Array,  # i32[B, P]
    is_kept: jax.Array,  # bool[B]
) -> Metadata:
    """Forget the observed queries of rows that move to other positions."""
    place = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    num_unmoved = jnp.sum(rows == place, axis=1, dtype=jnp.int32)
    pruned = metadata.sequences.pruned
    ends = pruned.positions_of(batch.seq_ids, start + num_unmoved)
    row = jnp.where(is_kept, batch.seq_ids, metadata.max_sequences)
    return forget_queries(metadata, row, ends)


def _as_step(
    batch: Batch, plan: _Plan, status: jax.Array, epochs: jax.Array | None
) -> Batch:
    """Return the causal step of the kept rows."""
    is_kept = (status == Status.OK) & (batch.query_lengths > 0)
    count = jnp.where(is_kept, plan.num_kept, 0)
    lengths = jnp.where(is_kept, plan.start + count, batch.context_lengths)
    row = jnp.arange(batch.num_rows, dtype=jnp.int32)[:, None]
    rank = row - batch.query_starts[None]
    owns = (rank >= 0) & (rank < count[None])
    valid = owns.any(axis=1)
    position = jnp.where(owns, plan.start[None] + rank, 0)
    position = batch.positions_of(jnp.sum(position, axis=1, dtype=jnp.int32))
    blocks = [
        blocks if blocks is None else jnp.where(valid, blocks, size.num_blocks)
        for blocks, size in zip(batch.blocks_of_groups, batch.sizes.groups, strict=True)
    ]
    return dataclasses.replace(
        batch,
        status=status,
        query_lengths=count,
        context_lengths=lengths,
        positions=jnp.where(valid, position, 0),
        valid=valid,
        offsets=jnp.where(valid, batch.offsets, 0),
        blocks_of_groups=tuple(blocks),
        epochs=epochs,
        mask=None,
        plan=None,
    )


def _move_rows(storage: BlockStorage, source: Slots, target: Slots) -> BlockStorage:
    """Copy rows of all layers between slots."""
    move = over_devices(storage.sharding, _move_on_device, _Operands, POOL)
    arrays = move(_Operands(arrays=storage.arrays, source=source, target=target))
    return storage.with_arrays(arrays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Operands:
    """The arrays of a move, each field with its sharding over devices."""

    # The arrays of a group by name, [L, N, K, T, ...].
    arrays: dict[str, jax.Array] = dataclasses.field(metadata=divided(POOL))
    source: Slots
    target: Slots


def _move_on_device(operands: _Operands) -> dict[str, jax.Array]:
    def move(array: jax.Array) -> jax.Array:
        (block, offset), (to_block, to_offset) = operands.source, operands.target
        rows = array.at[:, block, :, offset].get(mode="clip")
        return array.at[:, to_block, :, to_offset].set(rows, mode="drop")

    return {name: move(array) for name, array in operands.arrays.items()}
