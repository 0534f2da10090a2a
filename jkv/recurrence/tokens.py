"""Fold recurrent states token by token, all requests in lockstep.

The number of passes is dynamic: the largest token count of a request, so that a step
without tokens computes nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jkv.operations import fori_loop
from jkv.recurrence.rules import (
    Arrays,
    Rows,
    Rule,
    empty_outputs,
    keep_where,
    put_rows,
    take_rows,
)

Carry = TypeVar("Carry")

# Requests per pass of `fold_alike`, which gathers and scatters their states.
LANES = 8


class Pending(NamedTuple):
    """Inputs of pending tokens, cached from earlier steps."""

    inputs: Arrays  # {name: [B, Q, ...]}, oldest first
    first: jax.Array  # i32[B], index of the first used of the Q tokens
    counts: jax.Array  # i32[B]


def replay(
    rule: Rule,  # over one token of one sequence
    state: Arrays,  # {name: [B, ...]}, before the pending tokens
    pending: Pending,
    # {name: [R, ...]}, inputs that are not cached, since the state does not depend on
    # them (queries, for example); the rule receives zeros of their shapes
    lacking: Arrays,
) -> Arrays:
    """Return the states after the pending tokens."""

    def step(t: jax.Array, state: Arrays) -> Arrays:
        is_read = t < pending.counts
        # No row is valid, so this takes zeros.
        no_rows = jnp.zeros_like(pending.first), jnp.zeros_like(is_read)
        given = take_rows(lacking, *no_rows)
        given |= _take_pending(pending, t, is_read)
        return keep_where(is_read, jax.vmap(rule)(state, given)[0], state)

    return fold_times(pending.counts, step, state)


def read_ahead(
    rule: Rule,  # over one token of one sequence
    # {name: [B, ...]}, before the pending tokens; the states after them are discarded
    state: Arrays,
    outputs: Any,  # a pytree of [R, ...], as `fold_rows` returned it
    pending: Pending,  # tokens before the step, computed first
    inputs: Arrays,  # {name: [R, ...]}
    rows: Rows,
) -> Any:
    """Return the outputs, with the rows that may still be rolled back computed."""

    def step(t: jax.Array, carry: tuple[Arrays, Any]) -> tuple[Arrays, Any]:
        state, outputs = carry
        is_old, row = t < pending.counts, rows.starts + t - pending.counts
        is_new = ~is_old & (t < pending.counts + rows.counts)
        given = take_rows(inputs, row, is_new)
        given |= keep_where(is_old, _take_pending(pending, t, is_old), given)
        new, output = jax.vmap(rule)(state, given)
        outputs = put_rows(outputs, row, is_new, output)
        return keep_where(is_old | is_new, new, state), outputs

    return fold_times(pending.counts + rows.counts, step, (state, outputs))[1]


def fold_tokens(
    rule: Rule,  # over one token of one sequence
    state: Arrays,  # {name: [B, ...]}
    outputs: Any,  # a pytree of [R, ...]
    inputs: Arrays,  # {name: [R, ...]}
    rows: Rows,
    first: int = 0,  # index of each request's first row to fold
) -> tuple[Arrays, Any]:
    """Fold each request's rows from `first` on, one row per request and pass."""

    def step(t: jax.Array, carry: tuple[Arrays, Any]) -> tuple[Arrays, Any]:
        return fold_one(rule, *carry, inputs, rows.starts + t, t < rows.counts)

    return fold_times(rows.counts, step, (state, outputs), first)


def fold_alike(
    rule: Rule, state: Arrays, inputs: Arrays, rows: Rows
) -> tuple[Any, Arrays]:
    """Fold rows as `fold_rows` does, in passes of one fixed shape.

    The rule computes every row in a batch of the same size, so its bits depend on its
    state and input only (`jkv.generate(exact=)`). Requests with the most rows come
    first, so that prompts are not grouped with single tokens.
    """
    outputs = empty_outputs(rule, state, inputs)
    num_requests = rows.counts.shape[0]
    lanes = min(LANES, num_requests)
    order = jnp.argsort(-rows.counts)
    order = jnp.pad(order, (0, -num_requests % lanes), constant_values=num_requests)

    def take(group: jax.Array, carry: tuple[Arrays, Any]) -> tuple[Arrays, Any]:
        state, outputs = carry
        chosen = jax.lax.dynamic_slice_in_dim(order, group * lanes, lanes)
        known = jnp.minimum(chosen, num_requests - 1)
        kept = {name: array[known] for name, array in state.items()}
        counts = jnp.where(chosen < num_requests, rows.counts[known], 0)
        some = Rows(rows.starts[known], counts)
        kept, outputs = fold_tokens(rule, kept, outputs, inputs, some)
        state = {
            name: array.at[chosen].set(kept[name], mode="drop")
            for name, array in state.items()
        }
        return state, outputs

    num_owners = (rows.counts > 0).sum(dtype=jnp.int32)
    num_groups = jax.lax.div(num_owners + (lanes - 1), jnp.int32(lanes))
    state, outputs = fori_loop(jnp.int32(0), num_groups, take, (state, outputs))
    return outputs, state


def fold_times(
    counts: jax.Array,
    step: Callable[[jax.Array, Carry], Carry],
    carry: Carry,
    first: int = 0,
) -> Carry:
    """Run the passes `step(t, carry)`, as many as the largest count."""
    return fori_loop(jnp.asarray(first, jnp.int32), counts.max(), step, carry)


def fold_one(
    rule: Rule,
    state: Arrays,
    outputs: Any,
    inputs: Arrays,
    rows: jax.Array,
    valid: jax.Array,
    *,
    keeps_others: bool = True,
) -> tuple[Arrays, Any]:
    """Fold one row of each request, i32[B], where `valid`, bool[B].

    The states of other requests are kept, or undefined without `keeps_others`: that
    saves a pass over the states in rules that read the output from the new state.
    """
    new, output = jax.vmap(rule)(state, take_rows(inputs, rows, valid))
    if keeps_others:
        new = keep_where(valid, new, state)
    else:
        new = {name: array.astype(state[name].dtype) for name, array in new.items()}
    return new, put_rows(outputs, rows, valid, output)


def _take_pending(pending: Pending, t: jax.Array, valid: jax.Array) -> Arrays:
    """Return the inputs {name: [B, ...]} of pending token `t`."""
    width = next(iter(pending.inputs.values())).shape[1]
    requests = jnp.arange(valid.shape[0], dtype=jnp.int32)
    rows = requests * width + pending.first + t
    flat = {
        name: array.reshape(-1, *array.shape[2:])
        for name, array in pending.inputs.items()
    }
    return take_rows(flat, rows, valid)
