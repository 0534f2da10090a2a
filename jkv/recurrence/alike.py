"""States folded in passes of one shape, whatever a step consists of.

What `fold_rows` does otherwise depends on how many rows a request has in a step: single
ones are read by the rule, several by its form for pieces, and the two differ by
rounding. Here every row is read by the rule, beside as many others as in any other
pass, so a row's bits depend on its state and its input alone (`jkv.generate(exact=)`).

Requests with the most rows come first: a prompt beside single tokens is read in passes
of its own group.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jkv.recurrence.rules import Arrays, Rule
from jkv.recurrence.tokens import fold_tokens
from jkv.sharding.loops import fori_loop

# Requests of a pass: its states are gathered and put back.
LANES = 8


def fold_alike(
    rule: Rule,  # of one token of one sequence
    state: Arrays,  # {name: [B, ...]}
    outputs: Any,  # a pytree of [R, ...]
    inputs: Arrays,  # {name: [R, ...]}
    starts: jax.Array,  # i32[B], the first of each request's rows
    counts: jax.Array,  # i32[B]
) -> tuple[Arrays, Any]:
    """Fold the rows of all requests, one row of a few requests in each pass."""
    num_requests = counts.shape[0]
    lanes = min(LANES, num_requests)
    order = jnp.argsort(-counts)
    order = jnp.pad(order, (0, -num_requests % lanes), constant_values=num_requests)

    def take(group: jax.Array, carry: tuple[Arrays, Any]) -> tuple[Arrays, Any]:
        state, outputs = carry
        chosen = jax.lax.dynamic_slice_in_dim(order, group * lanes, lanes)
        is_request = chosen < num_requests
        known = jnp.minimum(chosen, num_requests - 1)
        kept = {name: array[known] for name, array in state.items()}
        some = jnp.where(is_request, counts[known], 0)
        kept, outputs = fold_tokens(rule, kept, outputs, inputs, starts[known], some)
        state = {
            name: array.at[chosen].set(kept[name], mode="drop")
            for name, array in state.items()
        }
        return state, outputs

    num_owners = (counts > 0).sum(dtype=jnp.int32)
    num_groups = jax.lax.div(num_owners + (lanes - 1), jnp.int32(lanes))
    return fori_loop(jnp.int32(0), num_groups, take, (state, outputs))
