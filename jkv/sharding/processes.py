"""Arrays of which other processes have a part, on a mesh of several hosts.

A process sees the memory of its own devices only. What needs an array whole, for a file
or for the host, is called by all processes of the mesh alike, in the same order.
"""

import functools
from typing import Any

import jax
import numpy as np


def is_shared(sharding: Any) -> bool:
    """Return whether other processes have devices of a sharding, or of what is none."""
    is_sharding = isinstance(sharding, jax.sharding.Sharding)
    return is_sharding and not sharding.is_fully_addressable


def bring_whole(array: Any) -> np.ndarray:
    """Return an array, of JAX or numpy, as numpy; every process gets all of it."""
    if isinstance(array, jax.Array) and not array.is_fully_replicated:
        where: Any = array.sharding
        if is_shared(where):
            array = _replicate(where.mesh)(array)
    return np.asarray(array)


def is_first(mesh: jax.sharding.Mesh) -> bool:
    """Return whether this process does what one of the mesh's processes has to do."""
    first = min(device.process_index for device in mesh.devices.flat)
    return bool(first == jax.process_index())


def agree(mesh: jax.sharding.Mesh, is_well: bool) -> bool:
    """Return whether all is well on every process; each waits for the others."""
    axes = jax.sharding.PartitionSpec(mesh.axis_names)
    where = jax.sharding.NamedSharding(mesh, axes)
    flags = jax.make_array_from_callback(
        (mesh.devices.size,), where, lambda _: np.array([is_well])
    )
    return bool(bring_whole(flags).all())


@functools.cache
def _replicate(mesh: jax.sharding.Mesh) -> Any:
    """Return a function that brings an array to every device of a mesh."""
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda array: array, out_shardings=everywhere)
