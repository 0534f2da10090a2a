"""Layout of a cache on a mesh: kv heads over one axis, tokens or pools over another.

Functions that read or write the pool run on each device, for the heads that it holds,
and nothing crosses between devices. XLA's partitioner does not see that in all cases,
and cannot cut a kernel, so they run inside a `jax.shard_map` over the axes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from jkv.operations import vary_over
from jkv.sharding.explicit_axes import (
    Specs,
    attend_on_auto_axes,
    call_on_auto_axes,
    explicit_axes,
    join_specs,
    on_auto_axes,
    spec_of,
)

Arrays = TypeVar("Arrays")
Params = ParamSpec("Params")
Result = TypeVar("Result")


class DividedAxes(NamedTuple):
    """The array axes of kv heads and of a block's tokens."""

    heads: int | None = None
    tokens: int | None = None


# Axes of a pool [L, N, K, T, D], of scales [L, N, K, T] and of rows [R, K, D].
POOL_HEADS, POOL_TOKENS, ROW_HEADS = 2, 3, 1


POOL, ROWS = DividedAxes(POOL_HEADS, POOL_TOKENS), DividedAxes(ROW_HEADS)


# Of arrays [H], and of replicated arrays.
PER_HEAD, WHOLE = DividedAxes(0), DividedAxes()


@dataclasses.dataclass(frozen=True)
class StorageSharding:
    """Sharding of a cache's keys and values over a mesh.

    Without axes all devices hold everything.
    """

    mesh: jax.sharding.Mesh  # the devices
    # Mesh axis over which kv heads are sharded; None for no axis.
    heads: str | None = None
    # Mesh axis over which the tokens of each block are sharded: of a block of T
    # tokens the first device has the first T / n, and so on. None for no axis.
    context: str | None = None
    # Copies of each kv head in the pool: more than one if the axis has more devices
    # than the model has kv heads; each device then stores one head.
    copies: int = 1

    @classmethod
    def of(
        cls,
        mesh: jax.sharding.Mesh,
        heads: str | None,  # mesh axis for the K kv heads
        context: str | None,  # mesh axis for the T tokens of a block
        num_kv_heads: int,  # K
        block_size: int,  # T
    ) -> "StorageSharding | None":
        """Return the sharding of a pool; raise for sizes that do not divide.

        An axis of one device shards nothing, unless it is an Explicit axis, which is
        part of the arrays' types. None for a mesh of one device.
        """
        copies = 1
        if heads is not None:
            num_devices = _num_devices(mesh, "heads", heads)
            if num_kv_heads % num_devices and num_devices % num_kv_heads:
                raise ValueError(
                    f"heads={heads!r} has {num_devices} devices, which must divide the "
                    f"{num_kv_heads} kv heads or be a multiple of them; change the "
                    f"mesh, or omit heads to replicate all heads"
                )
            copies = max(num_devices // num_kv_heads, 1)
            heads = heads if _divides(mesh, heads) else None
        if context is not None:
            num_devices = _num_devices(mesh, "context", context)
            if block_size % num_devices:
                raise ValueError(
                    f"block_size must be a multiple of the {num_devices} devices of "
                    f"mesh axis context={context!r}, got {block_size}; set it to "
                    f"{16 * num_devices}, for example"
                )
            context = context if _divides(mesh, context) else None
        if heads is None and context is None and mesh.size == 1:
            return None
        return cls(mesh, heads, context, copies)

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that shard arrays."""
        return tuple(axis for axis in (self.heads, self.context) if axis is not None)

    @property
    def open_axes(self) -> frozenset[str]:
        """Sharding axes that are not manual in the current trace."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return frozenset(self.axes) - frozenset(manual)

    @property
    def num_parts(self) -> int:
        """Number of devices that share each block."""
        return 1 if self.context is None else int(self.mesh.shape[self.context])

    def spec(
        self, array: DividedAxes, axes: frozenset[str] | None = None
    ) -> jax.sharding.PartitionSpec:
        """Return the PartitionSpec of an array, for all axes or a subset."""
        heads, context = (
            axis if axes is None or axis in axes else None
            for axis in (self.heads, self.context)
        )
        return find_spec(array, heads, context)


def find_spec(
    array: DividedAxes, heads: str | None, context: str | None
) -> jax.sharding.PartitionSpec:
    """Return the PartitionSpec of an array for these mesh axes; None for no axis."""
    parts = {
        array_axis: axis
        for array_axis, axis in zip(array, (heads, context), strict=True)
        if axis is not None and array_axis is not None
    }
    last = max(parts, default=-1)
    return jax.sharding.PartitionSpec(*map(parts.get, range(last + 1)))


# The sharding of a group's storage, and the specs of its sharded arrays by path.
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
    """Return the sharding of a group's pools on a mesh, as `StorageSharding.of`."""
    sharding = StorageSharding.of(mesh, heads, context, num_kv_heads, block_size)
    return sharding, {} if sharding is None else dict.fromkeys(
        paths, sharding.spec(POOL)
    )


def copies_of(sharding: StorageSharding | None) -> int:
    """Return the copies of each head in a pool, as seen in the current trace."""
    if sharding is None or sharding.heads not in sharding.open_axes:
        return 1
    return sharding.copies


def heads_on_device(sharding: StorageSharding | None, num_stored: int) -> int:
    """Return the kv heads per device of `num_stored` heads in the current trace."""
    if sharding is None or sharding.heads not in sharding.open_axes:
        return num_stored
    return num_stored // int(sharding.mesh.shape[sharding.heads])


def with_copies_of_heads(
    sharding: StorageSharding | None, array: jax.Array, head_axis: int
) -> jax.Array:
    """Repeat each head of an array as often as in the pool, adjacently."""
    copies = copies_of(sharding)
    return array if copies == 1 else jnp.repeat(array, copies, axis=head_axis)


def without_copies_of_heads(
    sharding: StorageSharding | None, array: Any, head_axis: int
) -> Any:
    """Drop repeated heads of a JAX or numpy array, and replicate the rest."""
    copies = copies_of(sharding)
    if sharding is None or sharding.heads is None or copies == 1:
        return array
    if isinstance(array, jax.Array):
        array = spread(array, sharding.mesh, sharding.heads, None)
    return array[(slice(None),) * head_axis + (slice(None, None, copies),)]


def _num_devices(mesh: jax.sharding.Mesh, name: str, axis: str) -> int:
    """Return the size of a mesh axis; raise if the mesh has none of this name."""
    if axis not in mesh.axis_names:
        raise ValueError(
            f"{name}={axis!r} must be an axis of the mesh, which has "
            f"{', '.join(map(repr, mesh.axis_names)) or 'none'}"
        )
    return int(mesh.shape[axis])


def _divides(mesh: jax.sharding.Mesh, axis: str) -> bool:
    return mesh.shape[axis] > 1 or is_explicit(mesh, axis)


@dataclasses.dataclass(frozen=True)
class PoolSharding:
    """Sharding of data-parallel pools: all arrays have a leading rank axis."""

    mesh: jax.sharding.Mesh  # the devices
    axis: str  # the mesh axis of ranks, each with its own pool

    def __post_init__(self) -> None:
        _num_devices(self.mesh, "pools", self.axis)  # raises if the mesh lacks the axis

    @property
    def num_ranks(self) -> int:
        """Number of pools."""
        return _num_devices(self.mesh, "pools", self.axis)

    def within(self, spec: jax.sharding.PartitionSpec) -> jax.sharding.NamedSharding:
        """Return the sharding of arrays that `spec` partitions within their rank."""
        return jax.sharding.NamedSharding(
            self.mesh, jax.sharding.PartitionSpec(self.axis, *spec)
        )

    def map(
        self,
        function: Callable[[Any, Any], Any],
        divided: Any,  # sharded over ranks
        # Replicated.
        whole: Any,
        *,
        out_specs: Any,
    ) -> Any:
        """Call `function(divided, whole)` on each rank; other mesh axes stay automatic.

        Varying types are not checked: the function calls models, whose own loops may
        not handle them.
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
    """Drop the leading axis of one rank's arrays [1, ...] inside `shard_map`."""
    return jax.tree.map(lambda array: array[0], arrays)


def with_rank(arrays: Arrays) -> Arrays:
    """Add the leading axis of one rank's arrays, [1, ...]."""
    return jax.tree.map(lambda array: array[None], arrays)


def is_typed(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> bool:
    """Return True if the mesh has an Explicit axis."""
    return jax.sharding.AxisType.Explicit in mesh.axis_types


def is_explicit(mesh: jax.sharding.Mesh, axis: str) -> bool:
    """Return True if the axis is part of the arrays' types."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return types[axis] == jax.sharding.AxisType.Explicit


def spread(
    arrays: Arrays, mesh: jax.sharding.Mesh, axis: str, array_axis: int | None
) -> Arrays:
    """Reshard arrays over a mesh axis at one of their axes; None replicates them.

    `shard_map` requires this for Explicit axes; for others it does nothing. Other mesh
    axes keep their sharding.
    """
    if not is_explicit(mesh, axis):
        return arrays
    reshard = functools.partial(_reshard, mesh=mesh, axis=axis, array_axis=array_axis)
    return jax.tree.map(reshard, arrays)


def with_full_spec(array: jax.Array) -> jax.Array:
    """Return an array of the same buffers, its spec as in results of jit.

    On Explicit axes these have an entry for each dimension, and jit compiles again for
    another spelling. Other arrays, and traced ones, are returned as they are.
    """
    where: Any = None if isinstance(array, jax.core.Tracer) else array.sharding
    if not isinstance(where, jax.sharding.NamedSharding) or not is_typed(where.mesh):
        return array
    spec = [*where.spec, *[None] * array.ndim][: array.ndim]
    return jax.make_array_from_single_device_arrays(
        array.shape,
        jax.sharding.NamedSharding(where.mesh, jax.sharding.PartitionSpec(*spec)),
        [shard.data for shard in array.addressable_shards],
    )


def as_auto(array: jax.Array) -> jax.Array:
    """Return an array of the same buffers on Auto axes; outside jit."""
    where: Any = getattr(array, "sharding", None)  # numpy arrays have none
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
    """Remove a mesh axis from an entry of a spec, or append it."""
    names = [*part] if isinstance(part, tuple) else [part]
    names = [name for name in names if name not in (None, axis)]
    if is_divided:
        names.append(axis)
    if len(names) > 1:
        return tuple(names)
    return names[0] if names else None


def divided(axes: DividedAxes) -> dict[str, DividedAxes]:
    """Return field metadata that declares the sharded axes of a dataclass's field."""
    return {"divided": axes}


def over_devices(
    sharding: StorageSharding | None,
    function: Callable[..., Any],
    kind: Any,
    result: DividedAxes,
    **static: Any,
) -> Callable[[Any], Any]:
    """Return `function` mapped over devices, each with its shard of the operands.

    Without a sharding, or inside a `shard_map` over its axes, return the function
    itself. It takes an operand dataclass, with the `divided` axes in the metadata of
    each field, and static keyword arguments. It must be a module-level function, since
    the result is cached.

    Explicit axes that do not shard the storage are Auto axes in the function. Its
    results are sharded over them as the field of the result's axes: pools stay where
    they are, and attention's output lies where its queries do.
    """

    def call(operands: Any) -> Any:
        mesh = find_typed_mesh(operands)
        if sharding is None and mesh is None:
            return function(operands, **static)
        given = tuple(sorted(static.items()))
        return _OverDevices(sharding, function, kind, result, given).call(
            operands, mesh
        )

    return call


def find_typed_mesh(arrays: Any) -> Any:
    """Return the mesh with Explicit axes in the types of arrays, None without one."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        leaves = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
        meshes: list[Any] = [jax.typeof(leaf).sharding.mesh for leaf in leaves]
        mesh = next((each for each in meshes if not each.empty), mesh)
    return mesh if is_typed(mesh) else None


def takes_explicit_axes(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Decorate attention to compute Explicit axes as Auto ones, the queries first."""

    @functools.wraps(function)
    def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        mesh = find_typed_mesh((args, kwargs))
        if mesh is None:
            return function(*args, **kwargs)
        result: Result = attend_on_auto_axes(function, mesh, args, kwargs)
        return result

    return call


def update_in_place(
    function: Callable[..., Any], stored: Arrays, *given: Any
) -> Arrays:
    """Return stored arrays after an update, with Explicit axes as Auto ones.

    They keep their sharding; the arrays in `given` may be sharded in any way.
    """
    mesh = find_typed_mesh((stored, given))
    if mesh is None:
        return function(stored, *given)
    specs = jax.tree.map(spec_of, stored)
    return call_on_auto_axes(function, mesh, (stored, *given), {}, specs)


class _OverDevices(NamedTuple):
    """A function of `over_devices`, hashable."""

    sharding: StorageSharding | None
    function: Callable[..., Any]
    kind: Any  # dataclass of the operands
    result: DividedAxes
    static: tuple[tuple[str, Any], ...]

    def call(self, operands: Any, mesh: Any) -> Any:
        """Run the function, on a mesh with Explicit axes or None."""
        sharding = self.sharding
        own = frozenset[str]() if sharding is None else sharding.open_axes
        typed = frozenset[str]() if mesh is None else explicit_axes(mesh)
        axes = typed - own
        if not axes:
            return self(operands)
        specs = self._specs_of(operands, own & typed, axes)
        return on_auto_axes(self, mesh, axes, specs)(operands)

    def __call__(self, operands: Any) -> Any:
        """Run the function on each device, or with replicated pools."""
        sharding, is_pool = self.sharding, self.result == POOL
        context = jax.sharding.get_abstract_mesh()
        axes = frozenset[str]() if sharding is None else sharding.open_axes
        if sharding is not None and axes:
            return self._map(sharding, axes, context, operands)
        whole: Any = jax.sharding.PartitionSpec()
        if sharding is not None and not is_typed(sharding.mesh):
            whole = jax.sharding.NamedSharding(sharding.mesh, whole)
        elif context.empty:
            whole = None
        if whole is None or context.manual_axes or (sharding and sharding.axes):
            return self.function(operands, **dict(self.static))
        results = self.function(_replicate(operands, whole), **dict(self.static))
        return jax.lax.with_sharding_constraint(results, whole) if is_pool else results

    def _map(
        self,
        sharding: StorageSharding,
        axes: frozenset[str],
        context: Any,
        operands: Any,
    ) -> Any:
        mesh = sharding.mesh if context.empty else context
        for axis in sharding.axes:
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"cache is sharded over axis {axis!r}, but the current mesh has "
                    f"{mesh.axis_names}; use the mesh that was passed to init"
                )
        return _map_over_devices(
            sharding, axes, mesh, self.function, self.kind, self.result, self.static
        )(operands)

    def _specs_of(
        self, operands: Any, own_axes: frozenset[str], axes: frozenset[str]
    ) -> Specs:
        """Return the PartitionSpecs of the results over their own and other axes.

        Both are Explicit axes: no type has Auto ones.
        """
        names = [
            field.name
            for field in dataclasses.fields(self.kind)
            if field.metadata.get("divided") == self.result
        ]
        sharding = self.sharding
        own = find_spec(self.result, None, None)
        if sharding is not None:
            own = sharding.spec(self.result, own_axes)
        if not names:
            return Specs.of(own)
        # Attention returns [R, H, Dv] and [R, H].
        ndim = 2 if self.result == ROWS else None
        field = getattr(operands, names[0])
        return Specs.of(
            jax.tree.map(
                lambda array: join_specs(spec_of(array, ndim), own, axes), field
            )
        )


def _replicate(operands: Any, whole: Any) -> Any:
    """Constrain the pools among operands to be replicated.

    Otherwise XLA shards a replicated pool like the rows of a sharded model.
    """
    pools = {
        field.name: jax.lax.with_sharding_constraint(
            getattr(operands, field.name), whole
        )
        for field in dataclasses.fields(operands)
        if field.metadata.get("divided") == POOL
    }
    return dataclasses.replace(operands, **pools)


@functools.cache
def _map_over_devices(
    sharding: StorageSharding,
    axes: frozenset[str],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    function: Callable[..., Any],
    kind: Any,
    result: DividedAxes,
    static: tuple[tuple[str, Any], ...],
) -> Callable[..., Any]:
    """Build the mapped function; cached, so that calls outside jit reuse it."""
    fields = {
        field.name: field.metadata.get("divided", WHOLE)
        for field in dataclasses.fields(kind)
    }

    def compute(*arrays: Any) -> Any:
        operands = kind(**dict(zip(fields, arrays, strict=True)))
        return function(operands, **dict(static))

    mapped = jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=tuple(sharding.spec(each, axes) for each in fields.values()),
        out_specs=sharding.spec(result, axes),
        axis_names=axes,
    )

    def move(arrays: Any, array_axes: DividedAxes) -> Any:
        by_mesh_axis = zip((sharding.heads, sharding.context), array_axes, strict=True)
        for axis, array_axis in by_mesh_axis:
            if axis in axes:
                arrays = spread(arrays, sharding.mesh, axis, array_axis)
        return arrays

    def call(operands: Any) -> Any:
        return mapped(*(move(getattr(operands, name), fields[name]) for name in fields))

    call.__name__ = function.__name__
    return jax.jit(call)


def with_whole_blocks(
    sharding: StorageSharding | None, blocks: jax.Array, array_axis: int
) -> jax.Array:
    """Return blocks with the tokens of all devices along an axis, replicated."""
    if sharding is None or sharding.context is None:
        return blocks
    axis = sharding.context
    if axis in sharding.open_axes:
        return spread(blocks, sharding.mesh, axis, None)
    # A sum rather than all_gather: its result has an unvarying type.
    size = blocks.shape[array_axis]
    shape = list(blocks.shape)
    shape[array_axis] = size * sharding.num_parts
    parts = vary_over(jnp.zeros(shape, blocks.dtype), frozenset({axis}))
    start = jax.lax.axis_index(axis) * size
    parts = jax.lax.dynamic_update_slice_in_dim(parts, blocks, start, array_axis)
    return jax.lax.psum(parts, axis)


def is_shared(where: Any) -> bool:
    """Return True if other processes hold devices of a sharding or array."""
    where = getattr(where, "sharding", where)
    is_sharding = isinstance(where, jax.sharding.Sharding)
    return is_sharding and not where.is_fully_addressable


def find_shared_mesh(arrays: Any) -> jax.sharding.Mesh | None:
    """Return the multi-process mesh of the arrays; None without one."""
    shared: Any = next(filter(is_shared, jax.tree.leaves(arrays)), None)
    return None if shared is None else shared.sharding.mesh
