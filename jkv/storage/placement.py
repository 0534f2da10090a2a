"""Arrays from the host on a device, in memory that a donated step can reuse.

JAX on a CPU borrows a numpy array that begins at a multiple of 64 bytes, whatever
`may_alias` says, and what is borrowed cannot be updated in place: the first donated
step would copy it. An array that begins elsewhere is copied at once, by `device_put`,
without a program to be compiled for its shape.
"""

import functools
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.cache_config import CacheConfig
from jkv.config.grouped_config import GroupedConfig, as_grouped
from jkv.config.state_config import StateConfig
from jkv.sharding.heads import copies_of, with_copies_of_heads
from jkv.sharding.processes import is_shared
from jkv.sharding.ranks import PoolSharding
from jkv.sharding.resharding import is_explicit
from jkv.sharding.storage_sharding import POOL, POOL_HEADS, StorageSharding
from jkv.state.cache import Cache, Device

Placement: TypeAlias = Device | jax.sharding.Sharding | None  # None: JAX's choice

Arrays = TypeVar("Arrays")

_ALIGNMENT = 64


class Placements(NamedTuple):
    """Where the arrays of a cache go."""

    shardings: tuple[StorageSharding | None, ...]  # what each group's storage remembers
    storage: tuple[Placement, ...]  # of each group's keys, values and scales
    pools: PoolSharding | None  # what the cache remembers
    metadata: Placement
    # Of each group with a state, where the arrays go that a mesh divides, by path.
    states: tuple[dict[str, Placement], ...]


def choose_placements(
    cache: CacheConfig | StateConfig | GroupedConfig | Cache,
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
    num_kv_heads = _list_kv_heads(cache)
    if mesh is None:
        for name, axis in axes.items():
            raise ValueError(f"{name}={axis!r} is an axis of a mesh; give the mesh")
        nothing = (None,) * len(num_kv_heads)
        where = (device,) * len(num_kv_heads)
        states: tuple[dict[str, Placement], ...] = ({},) * len(_list_state_axes(cache))
        return Placements(nothing, where, None, device, states)
    if device is not None:
        raise ValueError("give a device or a mesh, not both; a mesh is its devices")
    if len(set(axes.values())) < len(axes):
        given = ", ".join(f"{name}={axis!r}" for name, axis in axes.items())
        raise ValueError(f"{given}: {' and '.join(axes)} need an axis each")
    # Groups may differ in kv heads, and so in the copies of each.
    shardings = tuple(
        StorageSharding.of(
            mesh,
            heads=heads,
            context=context,
            num_kv_heads=of_group,
            block_size=cache.block_size,
        )
        for of_group in num_kv_heads
    )
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

    whole = jax.sharding.PartitionSpec()
    specs = [whole if each is None else each.spec(POOL) for each in shardings]
    states = tuple(
        {
            path: placement_of(_divide_state(mesh, heads, path, *divided))
            for path, divided in of_group.items()
        }
        for of_group in (_list_state_axes(cache) if heads else [])
    )
    return Placements(
        shardings,
        tuple(map(placement_of, specs)),
        ranks,
        placement_of(whole),
        states or ({},) * len(_list_state_axes(cache)),
    )


def put(arrays: Arrays, device: Placement) -> Arrays:
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

    def put_parts(array: np.ndarray) -> jax.Array:
        # `device_put` would compare what the processes have, array by array.
        return jax.make_array_from_callback(
            array.shape, device, lambda part: _unaligned(array[part])
        )

    return jax.tree.map(put_parts, arrays)


def put_by_layers(array: np.ndarray, where: Placements, group: int) -> jax.Array:
    """Put an array of storage, [L, N, K, ...], on its devices a layer at a time.

    One mapped from a file is then never in the host's memory as a whole. Of an array
    with an axis of ranks first, that is a layer of each rank.

    Args:
      array: with the model's heads, each once.
      where: of the cache.
      group: whose array it is.
    """
    axis = 0 if where.pools is None else 1  # of the layers
    sharding, device = where.shardings[group], where.storage[group]
    copies = copies_of(sharding)
    shape = list(array.shape)
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


def _list_kv_heads(
    cache: CacheConfig | StateConfig | GroupedConfig | Cache,
) -> list[int]:
    """Return the kv heads of the model in each group."""
    if isinstance(cache, Cache):
        return [each.num_kv_heads for each in cache.storage]
    return [group.num_kv_heads for group in as_grouped(cache).block_groups]


def _list_state_axes(
    cache: CacheConfig | StateConfig | GroupedConfig | Cache,
) -> list[dict[str, tuple[int, int]]]:
    """Return, of each group with a state, the axis of arrays that heads are on.

    By path in the group's storage, with the size of that axis.
    """
    if isinstance(cache, Cache):
        return [
            {
                path: (axis, each.arrays[path].shape[axis])
                for path, axis in each.divided_axes.items()
                if axis >= 0
            }
            for each in cache.states
        ]
    found = []
    for sizes in as_grouped(cache).state_sizes:
        axes = dict(sizes.heads_axes)
        of_group: dict[str, tuple[int, int]] = {}
        for parts, arrays, before in (
            (("rows", "snapshot_rows"), sizes.arrays, 2),
            (("inputs", "snapshot_inputs"), sizes.inputs, 3),
        ):
            for name, shape, _ in arrays:
                if name in axes:
                    divided = before + axes[name], shape[axes[name]]
                    of_group |= {f"{part}.{name}": divided for part in parts}
        found.append(of_group)
    return found


def _divide_state(
    mesh: jax.sharding.Mesh, heads: str | None, path: str, axis: int, size: int
) -> jax.sharding.PartitionSpec:
    """Return the partition of a state's array over the mesh axis of heads."""
    assert heads is not None
    num_devices = mesh.shape[heads]
    if size % num_devices:
        raise ValueError(
            f"axis {axis} of {path} has {size} elements, which the {num_devices} "
            f"devices of mesh axis {heads!r} cannot share evenly; leave its name out "
            f"of heads_axes to have it on every device"
        )
    return jax.sharding.PartitionSpec(*[None] * axis, heads)


def _find_layer_placement(
    device: Placement, axis: int, ndim: int, copies: int
) -> jax.sharding.NamedSharding | None:
    """Return where one layer of an array goes; None where JAX may choose.

    Args:
      device: of the array.
      axis: of the layers.
      ndim: the array's axes.
      copies: of each head, which are made where the array is.
    """
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
