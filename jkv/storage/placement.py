"""Arrays from the host on a device, in memory that a donated step can reuse.

JAX on a CPU borrows a numpy array that begins at a multiple of 64 bytes, whatever
`may_alias` says, and what is borrowed cannot be updated in place: the first donated
step would copy it. An array that begins elsewhere is copied at once, by `device_put`,
without a program to be compiled for its shape.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.cache_config import CacheConfig
from jkv.config.grouped_config import GroupedConfig, as_grouped
from jkv.config.state_config import StateConfig
from jkv.sharding.processes import is_shared
from jkv.sharding.storage_sharding import (
    POOL_HEADS,
    PoolSharding,
    StorageSharding,
    copies_of,
    is_explicit,
    with_copies_of_heads,
)
from jkv.state.cache import Cache, Device

Placement: TypeAlias = Device | jax.sharding.Sharding | None  # None: JAX's choice

Arrays = TypeVar("Arrays")

_ALIGNMENT = 64


class Placements(NamedTuple):
    """Where the arrays of a cache go."""

    shardings: tuple[StorageSharding | None, ...]  # what each group's storage remembers
    pools: PoolSharding | None  # what the cache remembers
    metadata: Placement  # and of all other arrays
    storage: tuple[dict[str, Placement], ...]  # of arrays of each group, by path

    def of(self, group: int, path: str) -> Placement:
        """Return where an array of a group's storage goes."""
        return self.storage[group].get(path, self.metadata)


def choose_placements(
    cache: CacheConfig | StateConfig | GroupedConfig | Cache,
    device: Placement,
    mesh: jax.sharding.Mesh | None,
    *,
    heads: str | None = None,
    context: str | None = None,
    pools: str | None = None,
) -> Placements:
    """Return where a cache goes, on a device or on a mesh, by the names of axes."""
    named = {"heads": heads, "context": context, "pools": pools}
    axes = {name: axis for name, axis in named.items() if axis is not None}
    groups: Sequence[Any] = (
        cache.storage if isinstance(cache, Cache) else as_grouped(cache).sizes
    )
    if mesh is None:
        for name, axis in axes.items():
            raise ValueError(f"{name}={axis!r} is an axis of a mesh; give the mesh")
        nothing = (None,) * len(groups)
        return Placements(nothing, None, device, ({},) * len(groups))
    if device is not None:
        raise ValueError("give a device or a mesh, not both; a mesh is its devices")
    if len(set(axes.values())) < len(axes):
        given = ", ".join(f"{name}={axis!r}" for name, axis in axes.items())
        raise ValueError(f"{given}: {' and '.join(axes)} need an axis each")
    # Groups may differ in kv heads, and so in the copies of each.
    found = [each.divide(mesh, heads, context) for each in groups]
    is_typed = any(is_explicit(mesh, axis) for axis in (heads, context) if axis)
    if pools and is_typed and jax.__version_info__ < (0, 12):
        raise ValueError(
            f"a shard_map of JAX {jax.__version__} over the axis of pools would gather "
            f"what Explicit axes divide on every device; make the mesh with "
            f"axis_types of AxisType.Auto, or take JAX 0.12"
        )
    ranks = None if pools is None else PoolSharding(mesh, pools)

    def placement_of(spec: jax.sharding.PartitionSpec) -> Placement:
        if ranks is None:
            return jax.sharding.NamedSharding(mesh, spec)
        return ranks.within(spec)

    storage = tuple(
        {path: placement_of(spec) for path, spec in specs.items()} for _, specs in found
    )
    shardings = tuple(sharding for sharding, _ in found)
    whole = placement_of(jax.sharding.PartitionSpec())
    return Placements(shardings, ranks, whole, storage)


def put(arrays: Arrays, device: Placement) -> Arrays:
    """Put a pytree of numpy arrays on a device, all in one call.

    No two of its arrays then share a buffer with another or with one of numpy's.
    """
    if not (isinstance(device, jax.sharding.Sharding) and is_shared(device)):
        return jax.device_put(jax.tree.map(_unaligned, arrays), device)

    def put_parts(array: np.ndarray) -> jax.Array:
        # `device_put` would compare what the processes have, array by array.
        return jax.make_array_from_callback(
            array.shape, device, lambda part: _unaligned(array[part])
        )

    return jax.tree.map(put_parts, arrays)


def put_by_layers(
    array: np.ndarray, where: Placements, group: int, path: str
) -> jax.Array:
    """Put an array of storage, [L, N, K, ...], on its devices a layer at a time.

    It has the model's heads, each once. One mapped from a file is then never in the
    host's memory as a whole. Of an array with an axis of ranks first, that is a layer
    of each rank.
    """
    axis = 0 if where.pools is None else 1  # of the layers
    sharding, device = where.shardings[group], where.of(group, path)
    copies = copies_of(sharding)
    shape = list(array.shape)
    if copies > 1:
        shape[axis + POOL_HEADS] *= copies
    pool = jnp.zeros(shape, array.dtype, device=device)
    where_layer = _find_layer_placement(device, axis, array.ndim, copies)
    for number in range(shape[axis]):
        layer: Any = array[(slice(None),) * axis + (number,)]
        if where_layer is not None:
            layer = put(layer, where_layer)
        # Waiting keeps copies of layers from piling up on their way.
        pool = jax.block_until_ready(
            _set_layer(pool, np.int32(number), layer, axis, sharding)
        )
    return pool


def _find_layer_placement(
    device: Placement, axis: int, ndim: int, copies: int
) -> jax.sharding.NamedSharding | None:
    """Return where one layer of an array goes; None where JAX may choose."""
    if not isinstance(device, jax.sharding.NamedSharding):
        return None
    axes = [*device.spec, *[None] * ndim][:ndim]
    if copies > 1:  # a layer has each head once
        axes[axis + POOL_HEADS] = None
    del axes[axis]
    return jax.sharding.NamedSharding(device.mesh, jax.sharding.PartitionSpec(*axes))


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
