"""Arguments of a `shard_map` over Explicit axes, moved to where it wants them."""

import functools
from typing import Any, TypeVar

import jax

Arrays = TypeVar("Arrays")


def is_explicit(mesh: jax.sharding.Mesh, axis: str) -> bool:
    """Return whether types of arrays say how the axis divides them."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return types[axis] == jax.sharding.AxisType.Explicit


def spread(
    arrays: Arrays, mesh: jax.sharding.Mesh, axis: str, array_axis: int | None
) -> Arrays:
    """Divide arrays by a mesh axis at one of their axes, None for none.

    `shard_map` wants that of Explicit axes; on others this does nothing. What further
    axes of the mesh divide stays divided.
    """
    if not is_explicit(mesh, axis):
        return arrays
    reshard = functools.partial(_reshard, mesh=mesh, axis=axis, array_axis=array_axis)
    return jax.tree.map(reshard, arrays)


def as_auto(array: jax.Array) -> jax.Array:
    """Return an array on axes that are all Auto, of the same buffers; outside jit."""
    where: Any = getattr(array, "sharding", None)  # numpy has none
    if not isinstance(where, jax.sharding.NamedSharding):
        return array
    names = where.mesh.axis_names
    automatic = (jax.sharding.AxisType.Auto,) * len(names)
    mesh = jax.sharding.Mesh(where.mesh.devices, names, axis_types=automatic)
    return jax.make_array_from_single_device_arrays(
        array.shape,
        jax.sharding.NamedSharding(mesh, where.spec),
        [shard.data for shard in array.addressable_shards],
    )


def _reshard(
    array: Any, *, mesh: jax.sharding.Mesh, axis: str, array_axis: int | None
) -> Any:
    kind: Any = jax.typeof(array)
    old = [*kind.sharding.spec, *[None] * (kind.ndim - len(kind.sharding.spec))]
    new = [
        _change(part, axis, is_divided=array_axis == i) for i, part in enumerate(old)
    ]
    if new == old:
        return array
    spec = jax.sharding.PartitionSpec(*new)
    if jax.sharding.get_abstract_mesh().empty:
        return jax.sharding.reshard(array, jax.sharding.NamedSharding(mesh, spec))
    return jax.sharding.reshard(array, spec)


def _change(part: Any, axis: str, *, is_divided: bool) -> Any:
    """Take the mesh axis out of a part of a spec, or make it the last there."""
    names = [*part] if isinstance(part, tuple) else [part]
    names = [name for name in names if name not in (None, axis)]
    if is_divided:
        names.append(axis)
    if len(names) > 1:
        return tuple(names)
    return names[0] if names else None
