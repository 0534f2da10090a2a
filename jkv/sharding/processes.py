"""Arrays sharded over several processes (multi-host meshes).

A process addresses only its own devices. Functions that need a whole array, for a file
or the host, are called by all processes of the mesh, in the same order.
"""

import functools
from typing import Any

import jax
import numpy as np

from jkv.sharding.storage_sharding import find_shared_mesh, is_shared

# Largest array in bytes to transfer by a jitted copy, which dispatches six times as
# fast as `device_put`; larger ones are transferred without a copy.
_SMALL = 2**16


def bring_whole(array: Any) -> np.ndarray:
    """Return a JAX or numpy array as numpy, gathered in every process."""
    if isinstance(array, jax.Array) and not array.is_fully_replicated:
        where: Any = array.sharding
        if is_shared(where):
            array = _replicate(where.mesh)(array)
    return np.asarray(array)


def bring(arrays: Any) -> Any:
    """Return a pytree of arrays as numpy; gather those of several processes."""
    if find_shared_mesh(arrays) is not None:
        return jax.tree.map(bring_whole, arrays)
    return jax.device_get(arrays)


def replicate(array: jax.Array) -> jax.Array:
    """Replicate a multi-process array to every device, without blocking."""
    if array.is_fully_replicated:
        return array
    where: Any = array.sharding
    found: jax.Array = _replicate(where.mesh)(array)
    return found


def is_writer(mesh: jax.sharding.Mesh) -> bool:
    """Return True if this process writes for all processes of the mesh."""
    first = min(device.process_index for device in mesh.devices.flat)
    return bool(first == jax.process_index())


def agree(mesh: jax.sharding.Mesh, is_well: bool) -> bool:
    """Return True if `is_well` is True in every process; a barrier."""
    axes = jax.sharding.PartitionSpec(mesh.axis_names)
    where = jax.sharding.NamedSharding(mesh, axes)
    flags = jax.make_array_from_callback(
        (mesh.devices.size,), where, lambda _: np.array([is_well])
    )
    return bool(bring_whole(flags).all())


class Broadcast:
    """Broadcasts from the first process of a mesh to all.

    Every process makes the same calls in the same order. Arrays are transferred between
    CPU devices where JAX has them beside accelerators, its default unless
    `jax_platforms` excludes them: then no call waits for accelerator computations.
    (`jax.experimental.multihost_utils.broadcast_one_to_all` uses the accelerators and
    blocks.)

    XLA's CPU runtime orders the programs of one thread, not those of several. Two
    concurrent collectives of the same processes could exchange each other's data, so a
    broadcast starts only after the previous one is done.

    Attributes:
      is_first: True in the source process.
      is_apart: True if the broadcast uses devices outside the mesh. Otherwise a
        broadcast blocks, and the caller must wait for the mesh's computations first.
      num_processes: of the mesh.
    """

    def __init__(self, mesh: jax.sharding.Mesh):
        processes = sorted({each.process_index for each in mesh.devices.flat})
        devices = [_choose_device(mesh, each) for each in processes]
        self.is_first = processes[0] == jax.process_index()
        self.num_processes = len(processes)
        self.is_apart = not set(devices) & set(mesh.devices.flat)
        self._under_way: jax.Array | None = None
        self._device = devices[processes.index(jax.process_index())]
        self._put_small = jax.jit(
            lambda array: array[None],
            out_shardings=jax.sharding.SingleDeviceSharding(self._device),
        )
        line = jax.sharding.Mesh(
            np.asarray(devices), ("process",), (jax.sharding.AxisType.Auto,)
        )
        spec = jax.sharding.PartitionSpec
        self._parts = jax.sharding.NamedSharding(line, spec("process"))
        everywhere = jax.sharding.NamedSharding(line, spec())
        self._first = jax.jit(lambda parts: parts[0], out_shardings=everywhere)
        self._all = jax.jit(lambda parts: parts, out_shardings=everywhere)

    def start(self, array: np.ndarray) -> jax.Array:
        """Start broadcasting the first process's array; shape and dtype must agree."""
        if self._under_way is not None:
            self._under_way.block_until_ready()
        found: jax.Array = self._first(self._spread(array))
        self._under_way = found
        return found if self.is_apart else jax.block_until_ready(found)

    def gather(self, array: np.ndarray) -> np.ndarray:
        """Gather every process's array in all processes, [P, ...].

        Raises RuntimeError in the first call if the other processes do not make theirs
        within 30 seconds, the timeout of JAX's connections between CPUs.
        """
        try:
            return np.asarray(self._all(self._spread(array)))
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(
                "processes of the mesh did not connect within 30 seconds; restart all "
                "of them, and reach this call at about the same time"
            ) from error

    def _spread(self, array: np.ndarray) -> jax.Array:
        """Return an array with one row per process."""
        shape = self.num_processes, *array.shape
        if array.nbytes <= _SMALL:
            part = self._put_small(array)
        else:
            part = jax.device_put(array[None], self._device)
        return jax.make_array_from_single_device_arrays(shape, self._parts, [part])


def _choose_device(mesh: jax.sharding.Mesh, process: int) -> Any:
    """Return a process's CPU device, or else its first device of the mesh."""
    of_mesh = [each for each in mesh.devices.flat if each.process_index == process]
    try:
        processors = jax.devices("cpu")
    except RuntimeError:  # `jax_platforms` excludes CPUs
        return of_mesh[0]
    own = (each for each in processors if each.process_index == process)
    return next(own, of_mesh[0])


@functools.cache
def _replicate(mesh: jax.sharding.Mesh) -> Any:
    """Return a function that replicates an array over a mesh."""
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda array: array, out_shardings=everywhere)
