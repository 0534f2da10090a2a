"""Loops that also work inside `jax.shard_map`, and work that is done at most once.

A carry has one type from the first trip to the last. Inside `shard_map` the type says
over which axes of the mesh a value varies, and what a loop begins with, zeros mostly,
varies over fewer than what its trips make of it. So the beginning is made to vary until
the types agree. Elsewhere `while_loop` and `fori_loop` are those of `lax`,
and nothing is added.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jkv.sharding.varying import is_manual, vary_alike, varying_axes

Carry = TypeVar("Carry")


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
