"""Loops that also work inside `jax.shard_map`.

Inside `shard_map` the type of each value has the manual mesh axes over which it varies.
Most operations promote these types; `while_loop` and branches require them to agree. An
initial carry, often zeros, varies over fewer axes than a trip's result, so it is cast
until the types agree. Outside `shard_map` these are the loops of `lax`.
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
    """Run `trip` while `goes_on(carry)` is True, like `lax.while_loop`."""
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
    """Run `trip` for i32[] `start` to `end - 1`, like `lax.fori_loop`."""
    if not is_manual():
        return lax.fori_loop(start, end, trip, carry)

    def next_trip(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        i, carry = state
        return i + 1, trip(i, carry)

    # If the end varies over an axis, so does the index.
    (start,) = vary_alike([start], [end])
    return while_loop(lambda state: state[0] < end, next_trip, (start, carry))[1]


def when(
    condition: jax.Array,
    function: Callable[..., Carry],
    carry: Carry,
    *given: jax.Array,
) -> Carry:
    """Return `function(carry, *given)` if the condition holds, else the carry.

    For work that most steps skip: a loop of at most one trip. A conditional would copy
    its operands, while a loop updates the carry, the pool included, in place. XLA
    hoists loop-invariant computations out of a loop, and so would run the work in every
    step; passing its inputs as `given` makes them loop-carried, and a trip zeroes them.
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
    """Return leaves that vary like a trip's result, and the trip traced with them."""
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
    """Return True if traced inside `jax.shard_map`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(arrays: Any) -> frozenset[str]:
    """Return the union of the axes over which a pytree's arrays or types vary."""
    return frozenset[str]().union(*map(_axes_of, jax.tree.leaves(arrays)))


def vary_over(arrays: Arrays, axes: frozenset[str]) -> Arrays:
    """Cast a pytree of arrays to also vary over `axes`; values are unchanged."""

    def cast(array: Any) -> Any:
        missing = tuple(sorted(axes - _axes_of(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, arrays) if axes else arrays


def vary_alike(arrays: Arrays, others: Any) -> Arrays:
    """Cast a pytree of arrays, each to also vary over its counterpart's axes."""
    leaves, structure = jax.tree.flatten(arrays)
    pairs = zip(leaves, others, strict=True)
    cast = [vary_over(leaf, _axes_of(other)) for leaf, other in pairs]
    return jax.tree.unflatten(structure, cast)


def vary_with(arrays: Arrays, others: Any) -> Arrays:
    """Cast a pytree of new arrays to vary over all axes of `others`.

    Arrays created inside `shard_map` vary over no axis, and a model's `lax.scan`
    rejects them as a carry that its writes make varying. Outside `shard_map` this does
    nothing.
    """
    if not is_manual():
        return arrays
    leaves = jax.tree.leaves(others)
    return vary_over(
        arrays, varying_axes([leaf for leaf in leaves if isinstance(leaf, jax.Array)])
    )


def type_alike(kind: jax.core.ShapedArray) -> dict[str, Any]:
    """Return `ShapedArray` keywords for a type that varies over the same axes."""
    if not varying_axes(kind):
        return {}
    whole = jax.sharding.NamedSharding(kind.sharding.mesh, jax.sharding.PartitionSpec())
    return {"sharding": whole, "manual_axis_type": kind.manual_axis_type}


def unvarying(kind: Any) -> Any:
    """Return an array's type without varying axes, as one device traces it."""
    nowhere = jax.typeof(np.zeros(())).manual_axis_type
    return kind.update(manual_axis_type=nowhere)


def _axes_of(array: Any) -> frozenset[str]:
    kind = array if isinstance(array, jax.core.ShapedArray) else jax.typeof(array)
    return frozenset(kind.manual_axis_type.varying)
