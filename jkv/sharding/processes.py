"""Arrays of which other processes have a part, on a mesh of several hosts.

A process sees the memory of its own devices only. What needs an array whole, for a file
or for the host, is called by all processes of the mesh alike, in the same order.
"""

import functools
from typing import Any

import jax
import numpy as np

# Bytes of an order, at most. A program that copies one is called in a sixth of the time
# that `device_put` takes, which copies nothing.
_SMALL = 2**16


def is_shared(where: Any) -> bool:
    """Return whether other processes have devices of a sharding, or of an array's."""
    where = getattr(where, "sharding", where)
    is_sharding = isinstance(where, jax.sharding.Sharding)
    return is_sharding and not where.is_fully_addressable


def find_shared_mesh(arrays: Any) -> jax.sharding.Mesh | None:
    """Return the mesh of several processes that arrays lie on; None without one."""
    shared: Any = next(filter(is_shared, jax.tree.leaves(arrays)), None)
    return None if shared is None else shared.sharding.mesh


def bring_whole(array: Any) -> np.ndarray:
    """Return an array, of JAX or numpy, as numpy; every process gets all of it."""
    if isinstance(array, jax.Array) and not array.is_fully_replicated:
        where: Any = array.sharding
        if is_shared(where):
            array = _replicate(where.mesh)(array)
    return np.asarray(array)


def bring(arrays: Any) -> Any:
    """Return a pytree of arrays as numpy, those of several processes whole."""
    if find_shared_mesh(arrays) is not None:
        return jax.tree.map(bring_whole, arrays)
    return jax.device_get(arrays)


def replicate(array: jax.Array) -> jax.Array:
    """Return an array of several processes on every device; nothing is waited for."""
    if array.is_fully_replicated:
        return array
    where: Any = array.sharding
    found: jax.Array = _replicate(where.mesh)(array)
    return found


def is_writer(mesh: jax.sharding.Mesh) -> bool:
    """Return whether this is the process of a mesh that writes for all of them."""
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


class Broadcast:
    """Arrays that the first process of a mesh tells to all of them.

    Every process makes the same calls in the same order. They go from processor to
    processor where JAX has processors as devices beside accelerators, as it has unless
    `jax_platforms` says otherwise: then no call waits for what accelerators compute.
    (`jax.experimental.multihost_utils.broadcast_one_to_all` takes the accelerators,
    and returns when the array is there.)

    XLA's CPU runtime keeps an order among programs that one thread starts, and none
    among those of several. Two collectives of the same processes that cross would get
    each other's data, so no broadcast is started before the last one is done.

    Attributes:
      is_first: whether this is the process whose arrays all get.
      is_apart: whether the mesh has none of the devices that the arrays go over. If it
        has, a broadcast is waited for, and the caller has to wait for what the mesh
        computes before it calls.
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
        """Start to bring the first process's array to all; of one shape and dtype."""
        if self._under_way is not None:
            self._under_way.block_until_ready()
        found: jax.Array = self._first(self._spread(array))
        self._under_way = found
        return found if self.is_apart else jax.block_until_ready(found)

    def gather(self, array: np.ndarray) -> np.ndarray:
        """Return what each process gives, [P, ...], to all of them.

        RuntimeError, in the first call, if the others do not come to theirs within the
        30 seconds in which JAX connects processors.
        """
        try:
            return np.asarray(self._all(self._spread(array)))
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(
                "the processes of the mesh did not come together: let all of them get "
                "here within 30 seconds, and begin again with all of them"
            ) from error

    def _spread(self, array: np.ndarray) -> jax.Array:
        """Return an array whose rows are what each process has."""
        shape = self.num_processes, *array.shape
        if array.nbytes <= _SMALL:
            part = self._put_small(array)
        else:
            part = jax.device_put(array[None], self._device)
        return jax.make_array_from_single_device_arrays(shape, self._parts, [part])


def _choose_device(mesh: jax.sharding.Mesh, process: int) -> Any:
    """Return a device of a process: its processor, or else the first of the mesh."""
    of_mesh = [each for each in mesh.devices.flat if each.process_index == process]
    try:
        processors = jax.devices("cpu")
    except RuntimeError:  # `jax_platforms` leaves them out
        return of_mesh[0]
    own = (each for each in processors if each.process_index == process)
    return next(own, of_mesh[0])


@functools.cache
def _replicate(mesh: jax.sharding.Mesh) -> Any:
    """Return a function that brings an array to every device of a mesh."""
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda array: array, out_shardings=everywhere)
