"""Computation on Explicit mesh axes as on Auto axes.

On an Explicit axis each operation needs to agree with the sharding of its operands, and
a loop with new zeros in its carry, or a scatter of sharded rows into a replicated pool,
does not. A call that mixes a model's rows with a cache's arrays treats these axes as
Auto ones, so that XLA partitions it, and gives its results the sharding of an operand.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax


class Specs(NamedTuple):
    """A pytree of PartitionSpecs, hashable."""

    leaves: tuple[jax.sharding.PartitionSpec, ...]
    structure: Any

    @classmethod
    def of(cls, specs: Any) -> Self:
        """Return the specs of results; one is for all of them."""
        leaves, structure = jax.tree.flatten(specs)
        return cls(tuple(leaves), structure)


def explicit_axes(mesh: jax.sharding.AbstractMesh) -> frozenset[str]:
    """Return the Explicit axes of a mesh."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(
        name for name, kind in pairs if kind == jax.sharding.AxisType.Explicit
    )


@functools.cache
def on_auto_axes(
    function: Callable[..., Any],  # of pytrees of arrays, hashable
    mesh: jax.sharding.AbstractMesh,
    axes: frozenset[str],  # Explicit ones
    specs: Specs,
) -> Callable[..., Any]:
    """Return a jitted function for which Explicit axes are Auto axes.

    It is cached, so that calls outside jit reuse it.
    """
    each = jax.tree.unflatten(specs.structure, specs.leaves)
    return jax.jit(_with_auto_axes(function, mesh, axes, each))


def _with_auto_axes(
    function: Callable[..., Any],
    mesh: jax.sharding.AbstractMesh,
    axes: frozenset[str],  # Explicit ones
    specs: Any,  # PartitionSpecs of the results; one is for all of them
) -> Callable[..., Any]:
    places = jax.tree.map(functools.partial(jax.sharding.NamedSharding, mesh), specs)
    names = tuple(sorted(axes))
    return jax.sharding.auto_axes(function, axes=names, out_sharding=places)


def attend_on_auto_axes(
    function: Callable[..., Any],
    mesh: jax.sharding.AbstractMesh,
    args: tuple[Any, ...],  # the first is [R, H, D]
    kwargs: dict[str, Any],
) -> Any:
    """Return the results of attention, rows and heads sharded as the queries'."""
    queries = args[0] if args else kwargs["queries"]
    return call_on_auto_axes(function, mesh, args, kwargs, spec_of(queries, 2))


def call_on_auto_axes(
    function: Callable[..., Any],
    mesh: jax.sharding.AbstractMesh,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    specs: Any,  # PartitionSpecs of the results; one is for all of them
) -> Any:
    """Return the results of a call for which Explicit axes are Auto axes."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]

    def compute(*arrays: jax.Array) -> Any:
        rest = iter(arrays)
        pairs = zip(leaves, is_array, strict=True)
        given = [next(rest) if of_jax else leaf for leaf, of_jax in pairs]
        args, kwargs = jax.tree.unflatten(structure, given)
        return function(*args, **kwargs)

    pairs = zip(leaves, is_array, strict=True)
    arrays = [leaf for leaf, of_jax in pairs if of_jax]
    return _with_auto_axes(compute, mesh, explicit_axes(mesh), specs)(*arrays)


def spec_of(array: Any, ndim: int | None = None) -> jax.sharding.PartitionSpec:
    """Return the sharding of an array's first axes in its type, by default of all."""
    kind: Any = jax.typeof(array)
    spec = [*kind.sharding.spec, *[None] * kind.ndim]
    return jax.sharding.PartitionSpec(*spec[: kind.ndim if ndim is None else ndim])


def join_specs(
    spec: jax.sharding.PartitionSpec,  # in the type of an array
    of_axes: jax.sharding.PartitionSpec,  # over the axes of the storage
    axes: frozenset[str],
) -> jax.sharding.PartitionSpec:
    """Return `of_axes`, and in the other dimensions `spec` over `axes`."""
    parts: list[Any] = []
    for i, part in enumerate(spec):
        names = part if isinstance(part, tuple) else (part,)
        kept = tuple(name for name in names if name in axes)
        parts.append(kept or None)
        if i < len(of_axes) and of_axes[i] is not None:
            parts[i] = of_axes[i]
    return jax.sharding.PartitionSpec(*parts)
