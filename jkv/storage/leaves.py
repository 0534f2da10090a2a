"""The leaves of a cache: their names, and their placement on devices.

A leaf is an array, an int, a dtype or a tuple of these, named by the fields and tuple
indices on its path: `storage.0.key_pool`, `metadata.groups.0.free_blocks.ids`. Names
come from the dataclass fields, so that a new field of the state needs no change here.

`put` copies host arrays into memory that donated steps can reuse.

On CPU, JAX aliases numpy arrays aligned to 64 bytes, regardless of `may_alias`, and an
aliased buffer cannot be updated in place: the first donated step would copy it.
`device_put` copies an unaligned array immediately, without compiling a program for its
shape.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.cache_config import CacheConfig
from jkv.config.grouped_config import GroupedConfig, as_grouped
from jkv.config.state_config import StateConfig
from jkv.sharding.storage_sharding import (
    POOL_HEADS,
    PoolSharding,
    StorageSharding,
    copies_of,
    is_explicit,
    is_shared,
    with_copies_of_heads,
)
from jkv.state.cache import Cache, Device

Value = TypeVar("Value")
Kinds: TypeAlias = Mapping[str, tuple[type, ...]]  # by path

_type_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)


def list_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a value with their names, through tuples and dicts."""
    parts: dict[str, Any] = {}
    if dataclasses.is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif isinstance(value, dict):
        parts = value
    elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        parts = {str(number): part for number, part in enumerate(value)}
    elif value is not None:
        yield name, value
    for field, part in parts.items():
        yield from list_leaves(part, _join(name, field))


def build(
    kind: type[Value], leaves: dict[str, Any], kinds: Kinds, name: str = ""
) -> Value:
    """Build a value from its leaves, removing them from `leaves`.

    Names are as in `list_leaves`; dtypes and tuples may be JSON's strings and lists.
    `kinds` has the candidate classes of fields with an abstract type, or of the members
    of a tuple. Raises ValueError if a required leaf is missing.
    """
    parts = {
        field: _build_field(hint, leaves, kinds, _join(name, field))
        for field, hint in _type_hints(kind).items()
    }
    return kind(**parts)


def _build_field(hint: Any, leaves: dict[str, Any], kinds: Kinds, path: str) -> Any:
    """Build a field's value, choosing among several types by the leaves present."""
    if path in leaves:
        return _of_json(leaves.pop(path))
    inner, prefix = typing.get_args(hint), f"{path}."
    options = inner if isinstance(hint, types.UnionType) else (hint,)
    within = [leaf for leaf in leaves if leaf.startswith(prefix)]
    if typing.get_origin(hint) is not tuple:
        return _build_one(kinds.get(path, options), leaves, kinds, path)
    options = kinds.get(path, inner[:1])
    numbers = {leaf.removeprefix(prefix).split(".")[0] for leaf in within}
    paths = [f"{prefix}{number}" for number in range(len(numbers))]
    return tuple(_build_one(options, leaves, kinds, path) for path in paths)


def _build_one(
    options: tuple[Any, ...], leaves: dict[str, Any], kinds: Kinds, path: str
) -> Any:
    """Build the candidate whose first field is among the leaves."""
    prefix = f"{path}."
    within = [leaf for leaf in leaves if leaf.startswith(prefix)]
    # Without leaves, only a class without fields fits.
    fitting = [
        option
        for option in filter(_is_dataclass, options)
        if bool(dataclasses.fields(option)) == bool(within)
    ]
    for option in fitting:
        first = f"{prefix}{dataclasses.fields(option)[0].name}" if within else ""
        if len(fitting) == 1 or any(leaf.startswith(first) for leaf in within):
            return build(option, leaves, kinds, path)
    if any(typing.get_origin(option) is dict for option in options):
        return {leaf.removeprefix(prefix): leaves.pop(leaf) for leaf in within}
    if type(None) in options:
        return None
    raise ValueError(f"it lacks {path!r}, required by this version of jkv")


def _is_dataclass(hint: Any) -> typing.TypeGuard[type[Any]]:
    return dataclasses.is_dataclass(hint)


def _of_json(leaf: Any) -> Any:
    """Return a leaf with dtypes from strings and tuples from lists."""
    if isinstance(leaf, str):
        return jnp.dtype(leaf)
    return tuple(map(_of_json, leaf)) if isinstance(leaf, list) else leaf


def _join(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field


Placement: TypeAlias = Device | jax.sharding.Sharding | None  # None: JAX's choice

Arrays = TypeVar("Arrays")

_ALIGNMENT = 64


class Placements(NamedTuple):
    """Placements of a cache's arrays."""

    shardings: tuple[StorageSharding | None, ...]  # stored in each group
    pools: PoolSharding | None  # sharding stored in the cache
    metadata: Placement  # also of all other arrays
    storage: tuple[dict[str, Placement], ...]  # of each group's arrays, by path

    def of(self, group: int, path: str) -> Placement:
        """Return the placement of an array of a group's storage."""
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
    """Return the placements of a cache on a device, or on the named axes of a mesh."""
    named = {"heads": heads, "context": context, "pools": pools}
    axes = {name: axis for name, axis in named.items() if axis is not None}
    groups: Sequence[Any] = (
        cache.storage if isinstance(cache, Cache) else as_grouped(cache).sizes
    )
    if mesh is None:
        for name, axis in axes.items():
            raise ValueError(f"mesh is required with {name}={axis!r}; pass mesh=")
        nothing = (None,) * len(groups)
        return Placements(nothing, None, device, ({},) * len(groups))
    if device is not None:
        raise ValueError("got both device and mesh; pass only one of them")
    if len(set(axes.values())) < len(axes):
        given = ", ".join(f"{name}={axis!r}" for name, axis in axes.items())
        raise ValueError(
            f"{' and '.join(axes)} must be different mesh axes, got {given}"
        )
    # Groups may differ in kv heads, and so in the number of replicas of each head.
    found = [each.divide(mesh, heads, context) for each in groups]
    is_typed = any(is_explicit(mesh, axis) for axis in (heads, context) if axis)
    if pools and is_typed and jax.__version_info__ < (0, 12):
        raise ValueError(
            f"mesh must have axis_types AxisType.Auto with pools=, got Explicit axes, "
            f"which shard_map of JAX {jax.__version__} would gather on every device; "
            f"change the mesh or use JAX 0.12"
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
    """Copy a pytree of numpy arrays to a device in one call.

    The results share no buffers with each other or with numpy.
    """
    if not (isinstance(device, jax.sharding.Sharding) and is_shared(device)):
        return jax.device_put(jax.tree.map(_unaligned, arrays), device)

    def put_parts(array: np.ndarray) -> jax.Array:
        # `device_put` would compare the processes' values, array by array.
        return jax.make_array_from_callback(
            array.shape, device, lambda part: _unaligned(array[part])
        )

    return jax.tree.map(put_parts, arrays)


def put_numpy(arrays: Any, device: jax.Device | None) -> Any:
    """Copy the numpy arrays of a pytree to a device, or uncommitted to the default."""
    return jax.tree.map(
        lambda leaf: (
            jax.device_put(leaf, device) if isinstance(leaf, np.ndarray) else leaf
        ),
        arrays,
    )


def put_by_layers(
    array: np.ndarray, where: Placements, group: int, path: str
) -> jax.Array:
    """Copy a storage array, [L, N, K, ...], to its devices one layer at a time.

    It has each of the model's heads once. One layer at a time, a memory-mapped array
    never occupies host memory as a whole. With a leading axis of ranks, a step copies
    that layer of every rank.
    """
    axis = 0 if where.pools is None else 1  # axis of layers
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
        # Waiting bounds the number of layers in flight.
        pool = jax.block_until_ready(
            _set_layer(pool, np.int32(number), layer, axis, sharding)
        )
    return pool


def _find_layer_placement(
    device: Placement, axis: int, ndim: int, copies: int
) -> jax.sharding.NamedSharding | None:
    """Return the placement of one layer of an array, or None for JAX's choice."""
    if not isinstance(device, jax.sharding.NamedSharding):
        return None
    axes = [*device.spec, *[None] * ndim][:ndim]
    if copies > 1:  # a layer has each head once
        axes[axis + POOL_HEADS] = None
    del axes[axis]
    return jax.sharding.NamedSharding(device.mesh, jax.sharding.PartitionSpec(*axes))


def _unaligned(array: np.ndarray) -> np.ndarray:
    """Copy an array to memory not aligned to `_ALIGNMENT`."""
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
