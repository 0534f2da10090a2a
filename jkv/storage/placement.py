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

from jkv.config.cache_config import CacheConfig
from jkv.sharding.heads import copies_of, with_copies_of_heads
from jkv.sharding.pools import PoolSharding
from jkv.sharding.processes import is_shared
from jkv.sharding.resharding import is_explicit
from jkv.sharding.storage_sharding import POOL, POOL_HEADS, StorageSharding
from jkv.state.cache import Cache, Device

Placement: TypeAlias = Device | jax.sharding.Sharding | None  # None: JAX's choice

Arrays = TypeVar("Arrays")

_ALIGNMENT = 64


class Placements(NamedTuple):
    """Where the arrays of a cache go."""

    sharding: StorageSharding | None  # what the cache remembers
    pools: PoolSharding | None  # likewise
    storage: Placement  # of keys, values and scales
    metadata: Placement


def choose_placements(
    cache: CacheConfig | Cache,
    device: Placement,
    mesh: jax.sharding.Mesh | None,
    *,
    heads: str | None = None,
    context: str | None = None,
    pools: str | None = None,
) -> Placements:
    """Return where a cache goes, on a device or on a mesh.

    Args:
      cache: the cache, or its configuration.
      device: a device or a sharding, for all arrays.
      mesh: devices instead.
      heads: the mesh axis over which the kv heads are spread, None for no axis.
      context: the mesh axis over which the tokens of each block are spread, likewise.
      pools: the mesh axis of which each rank has a pool, None for one pool.

    Raises:
      ValueError: for arguments that exclude each other, or sizes that do not fit.
    """
    named = {"heads": heads, "context": context, "pools": pools}
    axes = {name: axis for name, axis in named.items() if axis is not None}
    if mesh is None:
        for name, axis in axes.items():
            raise ValueError(f"{name}={axis!r} is an axis of a mesh; give the mesh")
        return Placements(None, None, device, device)
    if device is not None:
        raise ValueError("give a device or a mesh, not both; a mesh is its devices")
    if len(set(axes.values())) < len(axes):
        given = ", ".join(f"{name}={axis!r}" for name, axis in axes.items())
        raise ValueError(f"{given}: {' and '.join(axes)} need an axis each")
    sharding = StorageSharding.of(
        mesh,
        heads=heads,
        context=context,
        num_kv_heads=cache.num_kv_heads,
        block_size=cache.block_size,
    )
    is_typed = any(is_explicit(mesh, axis) for axis in (heads, context) if axis)
    if pools and is_typed and jax.__version_info__ < (0, 12):
        raise ValueError(
            f"a shard_map of JAX {jax.__version__} over the axis of pools would gather "
            f"what Explicit axes divide on every device; make the mesh with "
            f"axis_types of AxisType.Auto, or take JAX 0.12"
        )
    spread = jax.sharding.PartitionSpec() if sharding is None else sharding.spec(POOL)
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
    axes = [*where.storage.spec, *[None] * layer.ndim][: layer.ndim + 1]
    del axes[axis]
    if copies_of(where.sharding) > 1:  # the model's heads: the copies are made there
        axes[axis + POOL_HEADS - 1] = None
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
    sharding: StorageSharding | None,
) -> jax.Array:
    layer = with_copies_of_heads(sharding, layer, axis + POOL_HEADS - 1)
    return pool.at[(slice(None),) * axis + (number,)].set(layer)
