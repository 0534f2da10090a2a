"""Run functions on each device, for its shard of keys and values.

Reads and writes of the pool treat heads alike, so each device can process its own heads
without communication. XLA's partitioner does not always find this, and cannot split a
kernel. Such functions therefore run inside a `jax.shard_map` over the cache's axes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jkv.sharding.loops import vary_over
from jkv.sharding.storage_sharding import WHOLE, DividedAxes, StorageSharding, spread


def divided(axes: DividedAxes) -> dict[str, DividedAxes]:
    """Return field metadata that declares the sharded axes of a dataclass's field."""
    return {"divided": axes}


def over_devices(
    sharding: StorageSharding | None,
    function: Callable[..., Any],
    kind: Any,
    result: DividedAxes,
    **static: Any,
) -> Callable[[Any], Any]:
    """Return `function` mapped over devices, each with its shard of the operands.

    Without a sharding, or inside a `shard_map` over its axes, return the function
    itself. It takes an operand dataclass, with the `divided` axes in the metadata of
    each field, and static keyword arguments. It must be a module-level function, since
    the result is cached.
    """
    axes = frozenset() if sharding is None else sharding.open_axes
    if sharding is None or not axes:
        return functools.partial(function, **static)
    context = jax.sharding.get_abstract_mesh()
    mesh = sharding.mesh if context.empty else context
    for axis in sharding.axes:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"cache is sharded over axis {axis!r}, but the current mesh has "
                f"{mesh.axis_names}; use the mesh that was passed to init"
            )
    return _map_over_devices(
        sharding, axes, mesh, function, kind, result, tuple(sorted(static.items()))
    )


@functools.cache
def _map_over_devices(
    sharding: StorageSharding,
    axes: frozenset[str],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    function: Callable[..., Any],
    kind: Any,
    result: DividedAxes,
    static: tuple[tuple[str, Any], ...],
) -> Callable[..., Any]:
    """Build the mapped function; cached, so that calls outside jit reuse it."""
    fields = {
        field.name: field.metadata.get("divided", WHOLE)
        for field in dataclasses.fields(kind)
    }

    def compute(*arrays: Any) -> Any:
        operands = kind(**dict(zip(fields, arrays, strict=True)))
        return function(operands, **dict(static))

    mapped = jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=tuple(sharding.spec(each, axes) for each in fields.values()),
        out_specs=sharding.spec(result, axes),
        axis_names=axes,
    )

    def move(arrays: Any, array_axes: DividedAxes) -> Any:
        by_mesh_axis = zip((sharding.heads, sharding.context), array_axes, strict=True)
        for axis, array_axis in by_mesh_axis:
            if axis in axes:
                arrays = spread(arrays, sharding.mesh, axis, array_axis)
        return arrays

    def call(operands: Any) -> Any:
        return mapped(*(move(getattr(operands, name), fields[name]) for name in fields))

    call.__name__ = function.__name__
    return jax.jit(call)


def with_whole_blocks(
    sharding: StorageSharding | None, blocks: jax.Array, array_axis: int
) -> jax.Array:
    """Return blocks with the tokens of all devices along an axis, replicated."""
    if sharding is None or sharding.context is None:
        return blocks
    axis = sharding.context
    if axis in sharding.open_axes:
        return spread(blocks, sharding.mesh, axis, None)
    # A sum rather than all_gather: its result has an unvarying type.
    size = blocks.shape[array_axis]
    shape = list(blocks.shape)
    shape[array_axis] = size * sharding.num_parts
    parts = vary_over(jnp.zeros(shape, blocks.dtype), frozenset({axis}))
    start = jax.lax.axis_index(axis) * size
    parts = jax.lax.dynamic_update_slice_in_dim(parts, blocks, start, array_axis)
    return jax.lax.psum(parts, axis)
