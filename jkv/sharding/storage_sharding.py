"""How a cache lies on a mesh: kv heads over one axis, tokens or pools over another."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

Arrays = TypeVar("Arrays")


class DividedAxes(NamedTuple):
    """Which axis of an array has the kv heads, and which the tokens of a block."""

    heads: int | None = None
    tokens: int | None = None


# In [L, N, K, T, D] of a pool and [L, N, K, T] of scales, and in [R, K, D] of rows.
POOL_HEADS, POOL_TOKENS, ROW_HEADS = 2, 3, 1
POOL, ROWS = DividedAxes(POOL_HEADS, POOL_TOKENS), DividedAxes(ROW_HEADS)
# Of [H], and of what every device has whole.
PER_HEAD, WHOLE = DividedAxes(0), DividedAxes()


@dataclasses.dataclass(frozen=True)
class StorageSharding:
    """How the keys and values of a cache lie on a mesh."""

    mesh: jax.sharding.Mesh  # the devices
    # The mesh axis over which the kv heads are spread, None for no axis.
    heads: str | None = None
    # The mesh axis over which the tokens of each block are spread: of a block of T
    # tokens the first device has the first T / n, and so on. None for no axis.
    context: str | None = None
    # How often the pool has each head of the model: more than once where the axis has
    # more devices than the model has kv heads. Each device then holds one.
    copies: int = 1

    @classmethod
    def of(
        cls,
        mesh: jax.sharding.Mesh,
        heads: str | None,  # the axis to spread K heads over
        context: str | None,  # and the T tokens of a block
        num_kv_heads: int,  # K
        block_size: int,  # T
    ) -> "StorageSharding | None":
        """Return how to divide a pool, or None; refuse numbers that do not fit.

        An axis of one device divides nothing, unless types say even then that arrays
        are divided by it, as those of an Explicit axis do.
        """
        copies = 1
        if heads is not None:
            num_devices = _num_devices(mesh, "heads", heads)
            if num_kv_heads % num_devices and num_devices % num_kv_heads:
                raise ValueError(
                    f"{num_kv_heads} kv heads cannot be shared evenly by the "
                    f"{num_devices} devices of mesh axis {heads!r}; use a divisor or a "
                    f"multiple of {num_kv_heads} devices, or leave heads out to have "
                    f"all heads on every device"
                )
            copies = max(num_devices // num_kv_heads, 1)
            heads = heads if _divides(mesh, heads) else None
        if context is not None:
            num_devices = _num_devices(mesh, "context", context)
            if block_size % num_devices:
                raise ValueError(
                    f"blocks of {block_size} tokens cannot be shared evenly by the "
                    f"{num_devices} devices of mesh axis {context!r}, each of which "
                    f"has an equal part of every block; make the block_size a multiple "
                    f"of {num_devices}, such as {16 * num_devices}"
                )
            context = context if _divides(mesh, context) else None
        if heads is None and context is None:
            return None
        return cls(mesh, heads, context, copies)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that divide something."""
        return tuple(axis for axis in (self.heads, self.context) if axis is not None)

    @property
    def open_axes(self) -> frozenset[str]:
        """Those of the axes over which this is not traced for one device already."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return frozenset(self.axes) - frozenset(manual)

    @property
    def num_parts(self) -> int:
        """Parts of a block, each on another device."""
        return 1 if self.context is None else int(self.mesh.shape[self.context])

    def spec(
        self, array: DividedAxes, axes: frozenset[str] | None = None
    ) -> jax.sharding.PartitionSpec:
        """Return the partition of an array, by some of the axes or by all."""
        heads, context = (
            axis if axes is None or axis in axes else None
            for axis in (self.heads, self.context)
        )
        return find_spec(array, heads, context)


def find_spec(
    array: DividedAxes, heads: str | None, context: str | None
) -> jax.sharding.PartitionSpec:
    """Return the partition of an array by these mesh axes, None for none."""
    parts = {
        array_axis: axis
        for array_axis, axis in zip(array, (heads, context), strict=True)
        if axis is not None and array_axis is not None
    }
    last = max(parts, default=-1)
    return jax.sharding.PartitionSpec(*map(parts.get, range(last + 1)))


# What a group's storage remembers, and the partition of those of its arrays that are
# divided, by path.
Divided: TypeAlias = tuple[
    StorageSharding | None, dict[str, jax.sharding.PartitionSpec]
]


def divide_pools(
    num_kv_heads: int,
    block_size: int,
    paths: Iterable[str],
    mesh: jax.sharding.Mesh,
    heads: str | None,
    context: str | None,
) -> Divided:
    """Return how the pools of a group lie on a mesh, as `StorageSharding.of`."""
    sharding = StorageSharding.of(mesh, heads, context, num_kv_heads, block_size)
    return sharding, {} if sharding is None else dict.fromkeys(
        paths, sharding.spec(POOL)
    )


def copies_of(sharding: StorageSharding | None) -> int:
    """Return how often a pool, as it is seen here, holds the same head."""
    if sharding is None or sharding.heads not in sharding.open_axes:
        return 1
    return sharding.copies


def heads_on_device(sharding: StorageSharding | None, num_stored: int) -> int:
    """Return how many kv heads a device has of those stored in a pool as seen here."""
    if sharding is None or sharding.heads not in sharding.open_axes:
        return num_stored
    return num_stored // int(sharding.mesh.shape[sharding.heads])


def with_copies_of_heads(
    sharding: StorageSharding | None, array: jax.Array, head_axis: int
) -> jax.Array:
    """Return an array with each head as often as the pool has it, side by side."""
    copies = copies_of(sharding)
    return array if copies == 1 else jnp.repeat(array, copies, axis=head_axis)


def without_copies_of_heads(
    sharding: StorageSharding | None, array: Any, head_axis: int
) -> Any:
    """Return an array, of JAX or numpy, with each head once, and then whole."""
    copies = copies_of(sharding)
    if sharding is None or sharding.heads is None or copies == 1:
        return array
    if isinstance(array, jax.Array):
        array = spread(array, sharding.mesh, sharding.heads, None)
    return array[(slice(None),) * head_axis + (slice(None, None, copies),)]


def _num_devices(mesh: jax.sharding.Mesh, name: str, axis: str) -> int:
    """Return how many devices an axis has; refuse one that the mesh lacks."""
    if axis not in mesh.axis_names:
        raise ValueError(
            f"{name}={axis!r} is no axis of the mesh; it has "
            f"{', '.join(map(repr, mesh.axis_names)) or 'none'}"
        )
    return int(mesh.shape[axis])


def _divides(mesh: jax.sharding.Mesh, axis: str) -> bool:
    return mesh.shape[axis] > 1 or is_explicit(mesh, axis)


@dataclasses.dataclass(frozen=True)
class PoolSharding:
    """How pools lie on a mesh: every array of the cache has an axis of ranks first."""

    mesh: jax.sharding.Mesh  # the devices
    axis: str  # the mesh axis of which each rank has a pool

    def __post_init__(self) -> None:
        _num_devices(self.mesh, "pools", self.axis)  # refuses one that the mesh lacks

    @property
    def num_ranks(self) -> int:
        """Pools."""
        return _num_devices(self.mesh, "pools", self.axis)

    def within(self, spec: jax.sharding.PartitionSpec) -> jax.sharding.NamedSharding:
        """Return where arrays go that a spec partitions within their rank."""
        return jax.sharding.NamedSharding(
            self.mesh, jax.sharding.PartitionSpec(self.axis, *spec)
        )

    def map(
        self,
        function: Callable[[Any, Any], Any],
        divided: Any,  # of which each rank has its part
        whole: Any,
        *,
        out_specs: Any,
    ) -> Any:
        """Call `function(divided, whole)` on each rank; other axes stay as they are.

        Types do not say what varies over ranks: the function calls models, whose own
        loops need not know of it.
        """
        context = jax.sharding.get_abstract_mesh()
        mapped = jax.shard_map(
            function,
            mesh=self.mesh if context.empty else context,
            in_specs=(
                jax.sharding.PartitionSpec(self.axis),
                jax.sharding.PartitionSpec(),
            ),
            out_specs=out_specs,
            axis_names={self.axis},
            check_vma=False,
        )
        return mapped(
            spread(divided, self.mesh, self.axis, 0),
            spread(whole, self.mesh, self.axis, None),
        )


def without_rank(arrays: Arrays) -> Arrays:
    """Return what one rank has, of arrays [1, ...] inside `shard_map`."""
    return jax.tree.map(lambda array: array[0], arrays)


def with_rank(arrays: Arrays) -> Arrays:
    """Return what one rank answers, as arrays [1, ...]."""
    return jax.tree.map(lambda array: array[None], arrays)


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
