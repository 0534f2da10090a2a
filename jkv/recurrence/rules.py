"""Update rules of recurrent-state layers, for one token or one chunk.

A rule is written for one sequence and vmapped over many. Symbols: `B` requests, `R`
token rows, `C` tokens of a chunk; `...` is the shape of one sequence's state, or of one
token's input or output.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Arrays = dict[str, jax.Array]

# rule(state {name: [...]}, input {name: [...]}) -> (state, output), for one token.
Rule = Callable[[Arrays, Arrays], tuple[Arrays, Any]]

# chunk_rule(state {name: [...]}, inputs {name: [C, ...]}, count i32[]) -> (state,
# outputs [C, ...]), for the first `count` tokens; later inputs are zeros.
ChunkRule = Callable[[Arrays, Arrays, jax.Array], tuple[Arrays, Any]]


class Rows(NamedTuple):
    """The rows of B requests: `counts[b]` rows from `starts[b]` on."""

    starts: jax.Array  # i32[B]
    counts: jax.Array  # i32[B]; 0 leaves the state unchanged
    # i32[B], position of each first row, for chunk boundaries; None for 0
    first_positions: jax.Array | None = None


def trace_output(
    rule: Rule,  # over one token of one sequence
    state: Arrays,  # {name: [B, ...]}
    inputs: Arrays,  # {name: [R, ...]}
) -> Any:
    """Return the shapes and dtypes of a rule's output for one token."""

    def first(array: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)

    old, given = jax.tree.map(first, (state, inputs))
    new, output = jax.eval_shape(rule, old, given)
    if not isinstance(new, dict) or _shapes(new) != _shapes(old):
        raise ValueError(
            f"rule must return a state of the same shapes, {_shapes(old)}, and an "
            f"output; got "
            f"{_shapes(new) if isinstance(new, dict) else type(new).__name__}"
        )
    return output


def empty_outputs(rule: Rule, state: Arrays, inputs: Arrays) -> Any:
    """Return zeros for a rule's outputs, a pytree of [R, ...]."""
    num_rows = next(iter(inputs.values())).shape[0]
    output = trace_output(rule, state, inputs)
    return jax.tree.map(
        lambda leaf: jnp.zeros((num_rows, *leaf.shape), leaf.dtype), output
    )


def take_rows(inputs: Arrays, rows: jax.Array, valid: jax.Array) -> Arrays:
    """Gather inputs, [R, ...], at rows, [*shape]; zeros for invalid rows."""

    def take(array: jax.Array) -> jax.Array:
        index = jnp.where(valid, rows, array.shape[0])
        return jnp.take(array, index, axis=0, mode="fill", fill_value=0)

    return {name: take(array) for name, array in inputs.items()}


def put_rows(outputs: Any, rows: jax.Array, valid: jax.Array, new: Any) -> Any:
    """Scatter new outputs to the valid rows, which are distinct, of [R, ...]."""
    # Distinct out-of-range indices keep the scatter free of duplicates, so that
    # accelerators can run it in parallel.
    numbers = jnp.arange(rows.size, dtype=jnp.int32).reshape(rows.shape)

    def put(array: jax.Array, given: jax.Array) -> jax.Array:
        index = jnp.where(valid, rows, array.shape[0] + numbers)
        given = given.astype(array.dtype)
        return array.at[index].set(given, mode="drop", unique_indices=True)

    return jax.tree.map(put, outputs, new)


def keep_where(changes: jax.Array, new: Arrays, old: Arrays) -> Arrays:
    """Select arrays [B, ...], new where `changes`, bool[B], in the old dtypes."""

    def keep(array: jax.Array, given: jax.Array) -> jax.Array:
        mask = jnp.expand_dims(changes, range(1, array.ndim))
        return jnp.where(mask, given.astype(array.dtype), array)

    return {name: keep(old[name], array) for name, array in new.items()}


def _shapes(arrays: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(arrays[name].shape) for name in sorted(arrays)}
