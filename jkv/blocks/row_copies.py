"""Copies of rows of keys and values between the blocks of a pool.

Copies run in flat order over all sequences, a fixed number of columns at a time, so the
temporary memory is bounded. All rows of a trip are read before one is written.

Symbols in shape comments as in `jkv.state.metadata`; C columns, P columns of a trip.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jkv.blocks.sharing import may_copy
from jkv.formats.format import Formats, name_parts, parts_of
from jkv.operations import divide, fori_loop, gather, scatter
from jkv.sharding.storage_sharding import (
    POOL,
    POOL_HEADS,
    divided,
    over_devices,
    with_copies_of_heads,
)
from jkv.state import BlockStorage

COLUMNS_PER_TRIP = 64

# (keys f32[P, K, T, D], delta i32[P, K or 1, T], layer i32[]) -> keys
Rotate: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Arrays: TypeAlias = dict[str, jax.Array]


class RowCopies(NamedTuple):
    """Rows to copy into blocks of a group; entries of a sequence are in copy order."""

    # i32[B, X, C, T], old slots; X is 1, or L * K if layers and heads differ.
    slots: jax.Array
    old: jax.Array  # i32[B, M], old table rows
    target: jax.Array  # i32[B, C], N for columns that are not copied
    column: jax.Array  # i32[B, C], their columns in the new table rows


def copy_rows(
    storage: BlockStorage,
    copies: RowCopies,
    layers: tuple[int, ...],  # the model's number of each layer of the group
    rotate: Rotate | None = None,
) -> BlockStorage:
    """Return a group's storage with rows copied; keys are rotated by `rotate`.

    Outside jit there is no pass over the storage without copies.
    """
    if not may_copy(storage, copies.target):
        return storage
    num_layers, num_heads = storage.num_layers, storage.num_kv_heads
    slots, sharding, mesh_axis = copies.slots, storage.sharding, None
    if slots.shape[1] == 1:
        slots = slots[:, :, None]
    else:
        slots = slots.reshape(-1, num_layers, num_heads, *slots.shape[2:])
        slots = with_copies_of_heads(sharding, slots, POOL_HEADS)
        if sharding is not None and sharding.heads in sharding.open_axes:
            mesh_axis = sharding.heads
    operands = _Operands(
        arrays=storage.arrays,
        slots=slots,
        old=copies.old,
        target=copies.target,
        column=copies.column,
    )
    copy = over_devices(
        sharding,
        _copy,
        _Operands,
        POOL,
        formats=storage.formats,
        layers=layers,
        rotate=rotate,
        columns_per_trip=COLUMNS_PER_TRIP,
        mesh_axis=mesh_axis,
    )
    return storage.with_arrays(copy(operands))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Operands:
    """The arrays of a call, each field with its sharding over devices."""

    # The arrays of a group by name, [L, N, K, T, ...].
    arrays: Arrays = dataclasses.field(metadata=divided(POOL))
    # The other arrays are replicated. The slots of all heads, too: if they were
    # sharded, XLA would shard the checks of a call and add collectives.
    slots: jax.Array  # i32[B, L or 1, K or 1, C, T], old slots
    old: jax.Array  # i32[B, M]
    target: jax.Array  # i32[B, C]
    column: jax.Array  # i32[B, C]


@functools.partial(
    jax.jit,
    static_argnames=("formats", "layers", "rotate", "columns_per_trip", "mesh_axis"),
)
def _copy(
    operands: _Operands,
    *,
    formats: Formats,
    layers: tuple[int, ...],
    rotate: Rotate | None,
    columns_per_trip: int,
    mesh_axis: str | None,  # shards the heads of the arrays; None: slots are of these
) -> Arrays:
    """Copy the rows of each layer, a fixed number of columns at a time."""
    slots = operands.slots
    num_layers, num_blocks, num_heads, size = operands.arrays["key_pool"].shape[:4]
    if mesh_axis is not None:
        first = jax.lax.axis_index(mesh_axis) * num_heads
        slots = jax.lax.dynamic_slice_in_dim(slots, first, num_heads, POOL_HEADS)
    num_columns = operands.target.shape[1]
    target = operands.target.reshape(-1)
    most = target.shape[0]
    width = min(most, columns_per_trip)
    is_copied = target < num_blocks
    (listed,) = jnp.nonzero(is_copied, size=most + width, fill_value=most)
    listed = listed.astype(jnp.int32)
    num_trips = (jnp.sum(is_copied, dtype=jnp.int32) + width - 1) // width
    head = jnp.arange(num_heads, dtype=jnp.int32)[None, :, None]
    offset_to = jnp.arange(size, dtype=jnp.int32)[None, None]

    def copy(layer: jax.Array, first: jax.Array, arrays: Arrays) -> Arrays:
        entry = jax.lax.dynamic_slice_in_dim(listed, first, width)
        to = gather(target, entry, fill=num_blocks)
        request, place = divide(jnp.minimum(entry, most - 1), num_columns)
        of_layer = layer if slots.shape[1] > 1 else 0
        source = slots[request, of_layer, :, place]  # [P, K or 1, T]
        column, offset = divide(source, size)
        block = gather(operands.old, (request[:, None, None], column))
        cells = jnp.broadcast_arrays(layer, block, head, offset)
        rows = {name: gather(pool, tuple(cells)) for name, pool in arrays.items()}
        if rotate is not None:
            new = gather(operands.column, (request, place))[:, None, None] * size
            delta = new + offset_to - source
            number = jnp.asarray(layers, jnp.int32)[layer]
            rows |= _rotated(formats, rows, rotate, delta, number)
        return {
            name: scatter(pool, (jnp.broadcast_to(layer, to.shape), to), rows[name])
            for name, pool in arrays.items()
        }

    def copy_layer(layer: jax.Array, arrays: Arrays) -> Arrays:
        return fori_loop(
            jnp.int32(0),
            num_trips,
            lambda i, arrays: copy(layer, i * width, arrays),
            arrays,
        )

    num = jnp.where(num_trips > 0, jnp.int32(num_layers), 0)
    return fori_loop(jnp.int32(0), num, copy_layer, operands.arrays)


def _rotated(
    formats: Formats,
    rows: Arrays,  # [P, K, T, ...] by array
    rotate: Rotate,
    delta: jax.Array,
    layer: jax.Array,
) -> Arrays:
    """Return the arrays of keys after rotation by `delta` positions."""
    keys = formats.key.read(parts_of("key", rows)).astype(jnp.float32)
    rotated = rotate(keys, delta, layer)
    if jnp.shape(rotated) != keys.shape:
        raise ValueError(
            f"rotate must return keys of shape {list(keys.shape)}, got "
            f"{list(jnp.shape(rotated))}; rotate each row in place"
        )
    stored = formats.key.put(formats.key.prepare(rotated))
    return name_parts("key", stored)
