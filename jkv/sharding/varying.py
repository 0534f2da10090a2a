"""Over which axes of a mesh values vary, inside `jax.shard_map`.

There each value has a type that says over which of the mesh's manual axes it may differ
from device to device. Most operations join these types by themselves; loops and
branches want them to agree.
"""

from typing import Any, TypeVar

import jax
import numpy as np

Arrays = TypeVar("Arrays")


def is_manual() -> bool:
    """Return whether this is traced inside `jax.shard_map`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(arrays: Any) -> frozenset[str]:
    """Return the axes over which any array, or type of one, of a pytree varies."""
    return frozenset[str]().union(*map(_axes_of, jax.tree.leaves(arrays)))


def vary_over(arrays: Arrays, axes: frozenset[str]) -> Arrays:
    """Return a pytree of arrays that vary over these axes, too; values are the same."""

    def cast(array: Any) -> Any:
        missing = tuple(sorted(axes - _axes_of(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, arrays) if axes else arrays


def vary_alike(arrays: Arrays, others: Any) -> Arrays:
    """Return a pytree of arrays, each varying over the axes of its counterpart too."""
    leaves, structure = jax.tree.flatten(arrays)
    pairs = zip(leaves, others, strict=True)
    cast = [vary_over(leaf, _axes_of(other)) for leaf, other in pairs]
    return jax.tree.unflatten(structure, cast)


def vary_with(arrays: Arrays, others: Any) -> Arrays:
    """Return a pytree of fresh arrays that vary over all axes over which others do.

    Outside of `shard_map` these are the arrays. What is made inside varies over no
    axis, and a model's `lax.scan` refuses to carry it through its writes.
    """
    if not is_manual():
        return arrays
    leaves = jax.tree.leaves(others)
    return vary_over(
        arrays, varying_axes([leaf for leaf in leaves if isinstance(leaf, jax.Array)])
    )


def type_alike(kind: jax.core.ShapedArray) -> dict[str, Any]:
    """Return what `ShapedArray` is told for a type that varies over the same axes."""
    if not varying_axes(kind):
        return {}
    whole = jax.sharding.NamedSharding(kind.sharding.mesh, jax.sharding.PartitionSpec())
    return {"sharding": whole, "manual_axis_type": kind.manual_axis_type}


def unvarying(kind: Any) -> Any:
    """Return an array's type that varies over no axis, as one device traces it."""
    nowhere = jax.typeof(np.zeros(())).manual_axis_type
    return kind.update(manual_axis_type=nowhere)


def _axes_of(array: Any) -> frozenset[str]:
    kind = array if isinstance(array, jax.core.ShapedArray) else jax.typeof(array)
    return frozenset(kind.manual_axis_type.varying)
