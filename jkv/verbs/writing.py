"""write, commit: store the rows of a step, and index the blocks that it filled."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.attention.backend import SlotWrite
from jkv.attention.choice import find_stores, store
from jkv.formats.format import Formats
from jkv.masks import StepMask
from jkv.metadata.requests import Integer
from jkv.sharding.storage_sharding import (
    POOL,
    ROW_HEADS,
    ROWS,
    divided,
    over_devices,
    with_copies_of_heads,
)
from jkv.state import Batch, BlockStorage, Cache, GroupLayer, Slots
from jkv.state.cache import Role
from jkv.state.entry import any_layer, check_batch, locate_layer, takes_cache
from jkv.status import UsageError

# An environment variable, read at trace time: "0" stores rows with scatters instead of
# the kernel on every device.
WRITE_SWITCH = "JKV_WRITE_KERNEL"


@takes_cache(role=Role.WRITES)
def write(
    cache: Cache,
    layer: Integer,
    batch: Batch,
    keys: jax.Array,
    values: jax.Array | None = None,
) -> Cache:
    """Store one layer's keys and values in the slots of the batch.

    Args:
      cache: the cache that `append` returned with the batch, or a later one.
      layer: i32[] or int, 0 to L-1; may be traced. Rows of other layers are dropped.
      batch: the plan from `append`.
      keys: [R, K, D], any float dtype, cast to the cache's, or quantized; invalid rows
        are dropped.
      values: [R, K, Dv]. `None` for a cache with `values_in_keys`.

    Returns:
      The new cache. Under jit with donation the storage is updated in place.

    Raises:
      ValueError: if rows have the wrong shape or are not floats, the batch belongs to a
        cache of other sizes, `layer` is an int out of range, or the cache has no
        storage.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids)
      >>> rows = jnp.ones((1, 1, 8))
      >>> cache = jkv.write(cache, 0, batch, rows, rows)
      >>> keys, values, length = jkv.read(cache, 0, 0)
      >>> float(keys[:length].sum()), int(length)
      (8.0, 1)
    """
    found, rows = read_rows(cache, layer, batch, keys, values)
    if batch.mask is not None and batch.mask.reads_only:
        return cache  # the rows have no slots
    storage = cache.storage[found.group]
    context = None if storage.sharding is None else storage.sharding.context
    write_rows = over_devices(
        storage.sharding,
        _write,
        _Operands,
        POOL,
        formats=storage.formats,
        context=context,
        may_use_kernel=may_use_kernel(),
    )
    operands = _Operands(
        arrays=storage.arrays,
        rows=rows,
        layer=any_layer(found.layer, batch),
        slots=batch.slots_of(found.group),
        valid=batch.valid,
    )
    arrays = write_rows(operands)
    return cache.with_group_storage(found.group, storage.with_arrays(arrays))


def read_rows(
    cache: Cache,
    layer: Integer | GroupLayer,
    batch: Batch,
    keys: jax.Array,
    values: jax.Array | None,
) -> tuple[GroupLayer, dict[str, jax.Array]]:
    """Return the place of a layer, and rows for its arrays, [R, K, D], heads copied."""
    found = locate_layer(cache, layer)
    check_batch(cache, batch)
    storage = cache.storage[found.group]
    check_dtypes(storage)
    if (values is None) != (storage.value_pool is None):
        raise ValueError(
            "values must be None, the cache has values_in_keys; omit values"
            if storage.value_pool is None
            else "values must be an array, got None; only values_in_keys omits them"
        )
    rows = {"key_pool": keys} | ({} if values is None else {"value_pool": values})
    for name, array in rows.items():
        check_rows(storage, batch, name, array)
        rows[name] = with_copies_of_heads(storage.sharding, array, ROW_HEADS)
    return found, rows


def may_use_kernel() -> bool:
    """Return True unless the environment disables the kernel that stores rows."""
    return os.environ.get(WRITE_SWITCH) != "0"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Operands:
    """The arrays of a call, each field with its sharding over devices."""

    # The arrays of a group by name, [L, N, K, T, ...].
    arrays: dict[str, jax.Array] = dataclasses.field(metadata=divided(POOL))
    # Rows for the key and value arrays, [R, K, D].
    rows: dict[str, jax.Array] = dataclasses.field(metadata=divided(ROWS))
    # The other arrays are replicated.
    layer: jax.Array  # i32[]
    slots: Slots  # of each row
    valid: jax.Array  # bool[R]


@functools.partial(jax.jit, static_argnames=("formats", "context", "may_use_kernel"))
def _write(
    operands: _Operands, *, formats: Formats, context: str | None, may_use_kernel: bool
) -> dict[str, jax.Array]:
    """Store rows of keys and values, [R, K, D] each, in the slots of valid rows.

    If `context` is the mesh axis that shards the tokens of a block, store the local
    ones. Use the kernel if one is available and allowed.
    """
    arrays, slots = operands.arrays, operands.slots
    slot_write = SlotWrite(
        arrays=arrays,
        rows={
            name: formats.of(name)[0].prepare(each)
            for name, each in operands.rows.items()
        },
        formats=formats,
        layer=operands.layer,
        block_ids=slots.block_ids,
        offsets=slots.offsets,
        valid=operands.valid,
        part=None if context is None else jax.lax.axis_index(context),
    )
    return store(slot_write, find_stores(slot_write) if may_use_kernel else {})


@takes_cache(role=Role.COMMITS)
def commit(cache: Cache, batch: Batch) -> Cache:
    """Add the blocks that this step filled to the prefix index.

    Call it after the last layer's `write`, and before a `fork` of the written tokens:
    blocks committed without a write are found like any others and hold garbage (`debug`
    reports it). Without a prefix index the cache is returned unchanged.

    A block equal to an indexed one is released, and its sequence maps the indexed one:
    equal prefixes are stored once. A full block that is already shared but not indexed
    is indexed only if an equal block is, from an earlier step or request, as the
    prefixes of its sequences may differ; otherwise its sequence commits no further
    blocks.

    With several groups of layers the leading group decides: the first with full
    attention, or the one with the largest window. Blocks of the other groups are found
    with the leader's and are deduplicated in the same way, except blocks outside their
    window.

    If the step left a sequence at a multiple of `StateConfig.snapshot_every`, and it
    still has that length, its states are copied to a snapshot, unless one exists for
    its tokens.

    Args:
      cache: the cache after `write`.
      batch: the step. Sequences freed, truncated or reordered since then commit
        nothing. Nor do requests with a row that attends to a later row, now and in
        later steps, as their keys depend on more than the tokens before them; except
        spans that are `cacheable`.

    Returns:
      The new cache; the same object without a prefix index.

    Raises:
      ValueError: if the batch belongs to a cache of other sizes; the number of blocks
        may differ, after a `resize`.

    Example:
      >>> import jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids)
      >>> jkv.commit(cache, batch) is cache
      True
    """
    # A step planned before a `resize` may still be committed.
    check_batch(cache, batch, resized=True)
    if batch.mask is not None:
        if batch.mask.reads_only:
            return cache
        batch = _without_private(batch, batch.mask)
    metadata, moves = cache.metadata.index.commit(cache.metadata, batch)
    return cache.follow(metadata, moves)


def _without_private(batch: Batch, mask: StepMask) -> Batch:
    """Return the step without the requests that the prefix index must not hold.

    Their later steps do not continue indexed tokens, so they are not indexed either.
    """
    lengths = jnp.where(mask.is_private, 0, batch.query_lengths)
    return dataclasses.replace(batch, query_lengths=lengths, mask=None)


def check_dtypes(storage: BlockStorage) -> None:
    """Refuse arrays of another dtype than the stored one, as after a cast."""
    for name, array in storage.arrays.items():
        kept, part = storage.formats.of(name)
        expected = kept.arrays(2)[part].dtype
        if array.dtype != expected:
            raise UsageError(
                f"{name} must have dtype {expected} for {kept.dtype.name}, got "
                f"{array.dtype}; do not cast a cache, create one with "
                f"CacheConfig(dtype=...)"
            )


def check_rows(storage: BlockStorage, batch: Batch, name: str, rows: jax.Array) -> None:
    """Refuse keys or values without one row for each row of the batch."""
    sizes = {
        "R": batch.num_rows,
        "K": storage.num_kv_heads,
        "D": storage.head_dim if name == "key_pool" else storage.value_head_dim,
    }
    called, why = name.replace("_pool", "s"), "one row per row of the batch"
    expect(called, rows, "R K D", sizes, why=why)
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        raise UsageError(
            f"{called} must be floating point, got {rows.dtype}; pass "
            f"{called}.astype(...) to store these numbers"
        )
