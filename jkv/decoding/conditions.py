"""Work that most steps have no need of: a loop of no or one trip.

A conditional would copy what it hands on; a loop updates it in place, the pool too. XLA
computes before a loop what does not change in it, even if there is no trip: what much
work follows from is handed to it as `given`, of which nothing is left after a trip.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jkv.sharding.loops import fori_loop

Carry = TypeVar("Carry")


def when(
    condition: jax.Array,
    function: Callable[..., Carry],
    carry: Carry,
    *given: jax.Array,
) -> Carry:
    """Return `function(carry, *given)` if the condition holds, else the carry.

    Args:
      condition: bool[].
      function: what to do.
      carry: what it changes.
      given: arrays that its work follows from.
    """

    def trip(_: jax.Array, old: Any) -> Any:
        carry, given = old
        return function(carry, *given), [jnp.zeros_like(array) for array in given]

    trips = condition.astype(jnp.int32)
    carry, _ = fori_loop(jnp.int32(0), trips, trip, (carry, list(given)))
    return carry
