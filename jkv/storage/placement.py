"""Arrays from the host on a device, in memory that a donated step can reuse.

JAX on a CPU borrows a numpy array that begins at a multiple of 64 bytes, whatever
`may_alias` says, and what is borrowed cannot be updated in place: the first donated
step would copy it. An array that begins elsewhere is copied at once, by `device_put`,
without a program to be compiled for its shape.
"""

import functools
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jkv.sharding.heads import POOL_HEADS, HeadSharding, copies_of, with_copies_of_heads
from jkv.sharding.pools import PoolSharding
from jkv.sharding.processes import is_shared
from jkv.sharding.resharding import is_explicit
from jkv.state.cache import Device

Placement: TypeAlias = Device | jax.sharding.Sharding | None  # None: JAX's choice

Arrays = TypeVar("Arrays")

_ALIGNMENT = 64


class Placements(NamedTuple):
    """Where the arrays of a cache go."""

    sharding: HeadSharding | None  # what the cache remembers
    pools: PoolSharding | None  # likewise
    storage: Placement  # of keys, values and scales
    metadata: Placement


def choose_placements(
    num_kv_heads: int,
    device: Placement,
    mesh: jax.sharding.Mesh | None,
    heads: str | None,
    pools: str | None = None,
) -> Placements:
    """Return where a cache of K heads goes, on a device or on a mesh.

    Args:
      num_kv_heads: K of the model.
      device: a device or a sharding, for all arrays.
      mesh: devices instead.
      heads: the mesh axis over which the heads are spread, None for no axis.
      pools: the mesh axis of which each rank has a pool, None for one pool.

    Raises:
      ValueError: for arguments that exclude each other, or heads that do not fit.
    """
    if mesh is None:
        for name, axis in (("heads", heads), ("pools", pools)):
            if axis is not None:
                raise ValueError(f"{name}={axis!r} is an axis of a mesh; give the mesh")
        return Placements(None, None, device, device)
    if device is not None:
        raise ValueError("give a device or a mesh, not both; a mesh is its devices")
    if pools is not None and pools == heads:
        raise ValueError(f"heads and pools are both {heads!r}; they need an axis each")
    sharding = HeadSharding.of(mesh, heads, num_kv_heads) if heads else None
    if pools and heads and is_explicit(mesh, heads) and jax.__version_info__ < (0, 12):
        raise ValueError(
            f"a shard_map of JAX {jax.__version__} over the axis of pools would gather "
            f"all heads of Explicit axes on every device; make the mesh with "
            f"axis_types of AxisType.Auto, or take JAX 0.12"
        )
    spread = (
        jax.sharding.PartitionSpec() if sharding is None else sharding.spec(POOL_HEADS)
    )
    if pools is None:
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return Placements(
            sharding, None, jax.sharding.NamedSharding(mesh, spread), everywhere
        )
    ranks = PoolSharding(mesh, pools)
    return Placements(
        sharding, ranks, ranks.place(spread), ranks.place(jax.sharding.PartitionSpec())
    )


def place(arrays: Arrays, device: Placement) -> Arrays:
    """Put a pytree of numpy arrays on a device, all in one call.

    Args:
      arrays: the pytree.
      device: where to.

    Returns:
      The pytree of JAX arrays, no two of which share a buffer with another or with one
      of numpy's.
    """
    if not (isinstance(device, jax.sharding.Sharding) and is_shared(device)):
        return jax.device_put(jax.tree.map(_unaligned, arrays), device)

    def place_parts(array: np.ndarray) -> jax.Array:
        # `device_put` would compare what the processes have, array by array.
        return jax.make_array_from_callback(
            array.shape, device, lambda part: _unaligned(array[part])
        )

    return jax.tree.map(place_parts, arrays)


def place_by_layers(array: np.ndarray, where: Placements) -> jax.Array:
    """Put an array of storage, [L, N, K, ...], on its devices a layer at a time.

    One mapped from a file is then never in the host's memory as a whole. Of an array
    with an axis of ranks first, that is a layer of each rank.
    """
    axis = 0 if where.pools is None else 1  # of the layers
    shape = list(array.shape)
    shape[axis + POOL_HEADS] *= copies_of(where.sharding)
    pool = jnp.zeros(shape, array.dtype, device=where.storage)
    for number in range(shape[axis]):
        layer = _place_layer(array[(slice(None),) * axis + (number,)], where)
        # Waiting keeps copies of layers from piling up on their way.
        pool = jax.block_until_ready(
            _set_layer(pool, np.int32(number), layer, axis, where.sharding)
        )
    return pool


def _place_layer(layer: np.ndarray, where: Placements) -> np.ndarray | jax.Array:
    """Put a layer of an array of storage where the array has it."""
    if not isinstance(where.storage, jax.sharding.NamedSharding):
        return layer
    axis = 0 if where.pools is None else 1
    axes = [*where.storage.spec, *[None] * layer.ndim][: axis + POOL_HEADS + 1]
    del axes[axis]
    if copies_of(where.sharding) > 1:  # the model's heads: the copies are made there
        axes[-1] = None
    spec = jax.sharding.PartitionSpec(*axes)
    return place(layer, jax.sharding.NamedSharding(where.storage.mesh, spec))


def _unaligned(array: np.ndarray) -> np.ndarray:
    """Copy an array to memory that begins between two multiples of `_ALIGNMENT`."""
    room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = (_ALIGNMENT // 4 - room.ctypes.data) % _ALIGNMENT
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def _set_layer(
    pool: jax.Array,
    number: jax.Array,
    layer: jax.Array,
    axis: int,
    sharding: HeadSharding | None,
) -> jax.Array:
    layer = with_copies_of_heads(sharding, layer, axis + POOL_HEADS - 1)
    return pool.at[(slice(None),) * axis + (number,)].set(layer)
