"""Kv heads spread over an axis of a mesh, and functions that run on each device's own.

What reads or writes the pool treats every head alike, so each device can do it for the
heads that it holds, and nothing crosses between devices. The partitioner of XLA does
not see that in all cases, and a kernel it cannot cut at all. So such functions run
inside a `jax.shard_map` over the axis.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jkv.sharding.resharding import divide, is_explicit

# Where the heads stand: in [L, N, K, T, D] of a pool, in [R, K, D] of rows, in [H].
POOL_HEADS, ROW_HEADS, HEADS = 2, 1, 0


@dataclasses.dataclass(frozen=True)
class HeadSharding:
    """How the kv heads of a cache lie on a mesh.

    Attributes:
      mesh: the devices.
      axis: the mesh axis over which the heads are spread.
      copies: places in the pool that hold each head of the model: more than 1 where the
        axis has more devices than the model has kv heads. Each device then holds one.
    """

    mesh: jax.sharding.Mesh
    axis: str
    copies: int = 1

    @classmethod
    def of(
        cls, mesh: jax.sharding.Mesh, axis: str, num_kv_heads: int
    ) -> "HeadSharding | None":
        """Spread K heads over an axis.

        None where it has one device only, unless types say even then that arrays are
        divided by it, as those of an Explicit axis do.

        Raises:
          ValueError: for an axis that the mesh lacks, or one that K heads do not fit.
        """
        if axis not in mesh.axis_names:
            raise ValueError(
                f"heads={axis!r} is no axis of the mesh; it has "
                f"{', '.join(map(repr, mesh.axis_names)) or 'none'}"
            )
        num_devices = mesh.shape[axis]
        if num_kv_heads % num_devices and num_devices % num_kv_heads:
            raise ValueError(
                f"{num_kv_heads} kv heads cannot be shared evenly by the {num_devices} "
                f"devices of mesh axis {axis!r}; use a divisor or a multiple of "
                f"{num_kv_heads} devices, or leave heads out to have the whole pool on "
                f"every device"
            )
        sharding = cls(mesh, axis, max(num_devices // num_kv_heads, 1))
        return None if num_devices == 1 and not is_explicit(mesh, axis) else sharding

    @property
    def is_manual(self) -> bool:
        """Whether this is traced for one device of the axis, inside `shard_map`."""
        return self.axis in jax.sharding.get_abstract_mesh().manual_axes

    def spec(self, place: int | None) -> jax.sharding.PartitionSpec:
        """Return the partition of an array whose heads are this axis of it, if any."""
        if place is None:
            return jax.sharding.PartitionSpec()
        return jax.sharding.PartitionSpec(*[None] * place, self.axis)


def copies_of(sharding: HeadSharding | None) -> int:
    """Return how many places in the pool, as it is seen here, hold the same head."""
    return 1 if sharding is None or sharding.is_manual else sharding.copies


def with_copies_of_heads(
    sharding: HeadSharding | None, array: jax.Array, place: int
) -> jax.Array:
    """Return an array with each head as often as the pool has it, side by side."""
    copies = copies_of(sharding)
    return array if copies == 1 else jnp.repeat(array, copies, axis=place)


def without_copies_of_heads(
    sharding: HeadSharding | None, array: Any, place: int
) -> Any:
    """Return an array, of JAX or numpy, with each head once, and then whole."""
    copies = copies_of(sharding)
    if sharding is None or copies == 1:
        return array
    if isinstance(array, jax.Array):
        array = divide(array, sharding.mesh, sharding.axis, None)
    return array[(slice(None),) * place + (slice(None, None, copies),)]


def over_heads(
    sharding: HeadSharding | None,
    function: Callable[..., Any],
    places: tuple[int | None, ...],
    result: int,
    **static: Any,
) -> Callable[..., Any]:
    """Return a function that does its work on each device for the heads held there.

    Args:
      sharding: of the heads; with None, and inside a `shard_map` over its axis, the
        function is returned as it is.
      function: takes pytrees of arrays, and static arguments by keyword; a function of
        a module, so that what is made of it can be kept.
      places: for each argument, which axis of its arrays has the heads, None for none.
      result: which axis of the arrays that it returns.
      **static: hashable.
    """
    if sharding is None or sharding.is_manual:
        return functools.partial(function, **static)
    context = jax.sharding.get_abstract_mesh()
    mesh = sharding.mesh if context.empty else context
    if sharding.axis not in mesh.axis_names:
        raise ValueError(
            f"this cache's heads lie on axis {sharding.axis!r} of a mesh, the mesh in "
            f"use here has {mesh.axis_names}; use the mesh that was given to init"
        )
    return _map_over_heads(
        sharding, mesh, function, places, result, tuple(sorted(static.items()))
    )


@functools.cache
def _map_over_heads(
    sharding: HeadSharding,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    function: Callable[..., Any],
    places: tuple[int | None, ...],
    result: int,
    static: tuple[tuple[str, Any], ...],
) -> Callable[..., Any]:
    """Make the function; kept, so that calls outside of jit find it compiled."""
    mapped = jax.shard_map(
        functools.partial(function, **dict(static)),
        mesh=mesh,
        in_specs=tuple(map(sharding.spec, places)),
        out_specs=sharding.spec(result),
        axis_names={sharding.axis},
    )

    def call(*arguments: Any) -> Any:
        pairs = zip(arguments, places, strict=True)
        return mapped(
            *[
                divide(each, sharding.mesh, sharding.axis, place)
                for each, place in pairs
            ]
        )

    call.__name__ = function.__name__
    return jax.jit(call)
