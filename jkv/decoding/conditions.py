"""Work that most steps have no need of: a loop of no or one trip.

A conditional would copy what it hands on; a loop updates it in place, the pool too.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")


def when(
    condition: jax.Array, function: Callable[[Carry], Carry], carry: Carry
) -> Carry:
    """Return `function(carry)` if the condition, bool[], holds, else the carry."""
    trips = condition.astype(jnp.int32)
    return lax.fori_loop(jnp.int32(0), trips, lambda _, old: function(old), carry)
