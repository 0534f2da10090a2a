"""States folded token by token, all requests side by side.

The number of passes is counted at run time: it is that of the request with the most
tokens, and without any token nothing is computed.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jkv.recurrence.rules import Arrays, Rule, keep_where, put_rows, take_rows
from jkv.sharding.loops import fori_loop


def replay(
    rule: Rule,
    state: Arrays,
    pending: Arrays,
    counts: jax.Array,
    lacking: Arrays,
    first: jax.Array | int = 0,
) -> Arrays:
    """Return the states after tokens whose inputs the cache kept.

    Args:
      rule: of one token of one sequence.
      state: {name: [B, ...]}, before those tokens.
      pending: {name: [B, Q, ...]}, inputs of the newest tokens, oldest first.
      counts: i32[B], tokens of each request that are worked in, 0 to Q.
      lacking: {name: [R, ...]}, inputs that are not kept, since the state does not
        depend on them: queries, say. The rule gets zeros of their shapes.
      first: i32[B] or int, the first of the Q tokens that is worked in.
    """
    num_requests, width = next(iter(pending.values())).shape[:2]

    def flatten(array: jax.Array) -> jax.Array:
        return array.reshape(num_requests * width, *array.shape[2:])

    inputs = {name: flatten(array) for name, array in pending.items()}

    def whole_rule(state: Arrays, given: Arrays) -> tuple[Arrays, None]:
        zeros = {
            name: jnp.zeros(array.shape[1:], array.dtype)
            for name, array in lacking.items()
        }
        return rule(state, zeros | given)[0], None

    starts = jnp.arange(num_requests, dtype=jnp.int32) * width + first
    return fold_tokens(whole_rule, state, None, inputs, starts, counts)[0]


def fold_tokens(
    rule: Rule,
    state: Arrays,
    outputs: Any,
    inputs: Arrays,
    starts: jax.Array,
    counts: jax.Array,
    first: int = 0,
) -> tuple[Arrays, Any]:
    """Fold each request's rows from its `first` on, one of each request a pass.

    Args:
      rule: of one token of one sequence.
      state: {name: [B, ...]}.
      outputs: a pytree of [R, ...], or None to drop what the rule puts out.
      inputs: {name: [R, ...]}.
      starts: i32[B].
      counts: i32[B], rows of each request, those before `first` counted.
      first: of the rows that are folded.
    """

    def step(t: jax.Array, carry: tuple[Arrays, Any]) -> tuple[Arrays, Any]:
        return fold_one(rule, *carry, inputs, starts + t, t < counts)

    start = jnp.asarray(first, jnp.int32)
    return fori_loop(start, counts.max(), step, (state, outputs))


def fold_one(
    rule: Rule,
    state: Arrays,
    outputs: Any,
    inputs: Arrays,
    rows: jax.Array,
    valid: jax.Array,
) -> tuple[Arrays, Any]:
    """Fold one row of each request, i32[B], where it is valid, bool[B]."""
    new, output = jax.vmap(rule)(state, take_rows(inputs, rows, valid))
    return keep_where(valid, new, state), put_rows(outputs, rows, valid, output)
