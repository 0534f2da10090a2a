"""Loops that also work inside `jax.shard_map`, and work that is done at most once.

Inside `shard_map` each value has a type that says over which of the mesh's manual axes
it may differ from device to device. Most operations join these types by themselves;
loops and branches want them to agree. What a loop begins with, zeros mostly, varies
over fewer axes than what its trips make of it. So the beginning is made to vary until
the types agree. Elsewhere `while_loop` and `fori_loop` are those of `lax`, and nothing
is added.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

Carry = TypeVar("Carry")
Arrays = TypeVar("Arrays")


def while_loop(
    goes_on: Callable[[Carry], jax.Array], trip: Callable[[Carry], Carry], carry: Carry
) -> Carry:
    """Make trips for as long as `goes_on(carry)`, as `lax.while_loop`."""
    if not is_manual():
        return lax.while_loop(goes_on, trip, carry)
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, carry))

    def trip_leaves(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(trip(jax.tree.unflatten(structure, leaves)))

    leaves, traced = _settle(trip_leaves, leaves)
    leaves = lax.while_loop(
        lambda leaves: goes_on(jax.tree.unflatten(structure, leaves)),
        lambda leaves: jaxpr_as_fun(traced)(*leaves),
        leaves,
    )
    return jax.tree.unflatten(structure, leaves)


def fori_loop(
    start: jax.Array,
    end: jax.Array,
    trip: Callable[[jax.Array, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Make the trips i32[] `start` to `end - 1`, as `lax.fori_loop`."""
    if not is_manual():
        return lax.fori_loop(start, end, trip, carry)

    def next_trip(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        i, carry = state
        return i + 1, trip(i, carry)

    # Where the end varies the count of trips does, and the index with it.
    (start,) = vary_alike([start], [end])
    return while_loop(lambda state: state[0] < end, next_trip, (start, carry))[1]


def when(
    condition: jax.Array,
    function: Callable[..., Carry],
    carry: Carry,
    *given: jax.Array,
) -> Carry:
    """Return `function(carry, *given)` if the condition holds, else the carry.

    For work that most steps have no need of: a loop of no or one trip. A conditional
    would copy what it hands on; a loop updates it in place, the pool too. XLA moves
    what does not change inside a loop in front of it, where it is computed even if no
    trip is made. So the arrays that the work begins with are a part of what changes:
    they are `given`, and a trip leaves zeros of them.
    """

    def trip(_: jax.Array, old: Any) -> Any:
        carry, given = old
        return function(carry, *given), [jnp.zeros_like(array) for array in given]

    trips = condition.astype(jnp.int32)
    carry, _ = fori_loop(jnp.int32(0), trips, trip, (carry, list(given)))
    return carry


def _settle(
    trip: Callable[..., list[jax.Array]], leaves: list[jax.Array]
) -> tuple[list[jax.Array], Any]:
    """Return leaves that vary as a trip leaves them, and the trip traced on those."""
    while True:
        traced = jax.make_jaxpr(trip)(*leaves)
        after = traced.out_avals
        if all(
            varying_axes(new) <= varying_axes(old)
            for new, old in zip(after, leaves, strict=True)
        ):
            break
        leaves = vary_alike(leaves, after)

    def trip_alike(*leaves: jax.Array) -> list[jax.Array]:
        return vary_alike(jaxpr_as_fun(traced)(*leaves), leaves)

    return leaves, jax.make_jaxpr(trip_alike)(*leaves)


def is_manual() -> bool:
    """Return whether this is traced inside `jax.shard_map`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(arrays: Any) -> frozenset[str]:
    """Return the axes over which any array, or type of one, of a pytree varies."""
    return frozenset[str]().union(*map(_axes_of, jax.tree.leaves(arrays)))


def vary_over(arrays: Arrays, axes: frozenset[str]) -> Arrays:
    """Return a pytree of arrays that vary over these axes, too; values are the same."""

    def cast(array: Any) -> Any:
        missing = tuple(sorted(axes - _axes_of(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, arrays) if axes else arrays


def vary_alike(arrays: Arrays, others: Any) -> Arrays:
    """Return a pytree of arrays, each varying over the axes of its counterpart too."""
    leaves, structure = jax.tree.flatten(arrays)
    pairs = zip(leaves, others, strict=True)
    cast = [vary_over(leaf, _axes_of(other)) for leaf, other in pairs]
    return jax.tree.unflatten(structure, cast)


def vary_with(arrays: Arrays, others: Any) -> Arrays:
    """Return a pytree of fresh arrays that vary over all axes over which others do.

    Outside of `shard_map` these are the arrays. What is made inside varies over no
    axis, and a model's `lax.scan` refuses to carry it through its writes.
    """
    if not is_manual():
        return arrays
    leaves = jax.tree.leaves(others)
    return vary_over(
        arrays, varying_axes([leaf for leaf in leaves if isinstance(leaf, jax.Array)])
    )


def type_alike(kind: jax.core.ShapedArray) -> dict[str, Any]:
    """Return what `ShapedArray` is told for a type that varies over the same axes."""
    if not varying_axes(kind):
        return {}
    whole = jax.sharding.NamedSharding(kind.sharding.mesh, jax.sharding.PartitionSpec())
    return {"sharding": whole, "manual_axis_type": kind.manual_axis_type}


def unvarying(kind: Any) -> Any:
    """Return an array's type that varies over no axis, as one device traces it."""
    nowhere = jax.typeof(np.zeros(())).manual_axis_type
    return kind.update(manual_axis_type=nowhere)


def _axes_of(array: Any) -> frozenset[str]:
    kind = array if isinstance(array, jax.core.ShapedArray) else jax.typeof(array)
    return frozenset(kind.manual_axis_type.varying)
