"""States of requests with many rows, folded in pieces, a few requests side by side.

A program that gave every request as many rows as the longest has would compute mostly
nothing: one prompt comes in beside many sequences of one row. So a trip takes the few
requests with the most rows left and one piece of each. As many trips are made as there
is work, in a wide and a narrow form: the last prompt alone is computed alone.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jkv.recurrence.rules import (
    Arrays,
    ChunkRule,
    Rows,
    keep_where,
    put_rows,
    take_rows,
)
from jkv.sharding.loops import while_loop

# Requests that a trip takes side by side where there are several: enough to fill a GPU
# with their heads, few enough for two prompts not to pay for many.
LANES = 4


def fold_pieces(
    chunk_rule: ChunkRule,  # of some tokens of one sequence
    state: Arrays,  # {name: [B, ...]}
    outputs: Any,  # a pytree of [R, ...]
    inputs: Arrays,  # {name: [R, ...]}
    long: Rows,  # of requests that are folded in pieces; others have none
    chunk_size: int,  # C, tokens of a piece
    most: int,  # requests that can be long, known from the call's shapes
) -> tuple[Arrays, Any]:
    """Fold the rows of long requests, a piece of a few of them in each trip."""
    done = jnp.zeros_like(long.counts)
    for lanes in (min(LANES, most), 1) if most > 1 else (1,):
        # A single request is left to the narrow form.
        fewest = 2 if lanes > 1 else 1

        def goes_on(
            carry: tuple[Arrays, Any, jax.Array], fewest: int = fewest
        ) -> jax.Array:
            return (long.counts > carry[2]).sum() >= fewest

        def trip(
            carry: tuple[Arrays, Any, jax.Array], lanes: int = lanes
        ) -> tuple[Arrays, Any, jax.Array]:
            state, outputs, done = carry
            requests = jax.lax.top_k(long.counts - done, lanes)[1]
            kept = {name: array[requests] for name, array in state.items()}
            some = jax.tree.map(lambda array: array[requests], long)
            rows, sizes = _cut(some, done[requests], chunk_size)
            valid = jnp.arange(chunk_size, dtype=jnp.int32)[None, :] < sizes[:, None]
            given = take_rows(inputs, rows, valid)
            new, output = jax.vmap(chunk_rule)(kept, given, sizes)
            new = keep_where(sizes > 0, new, kept)
            state = {
                name: array.at[requests].set(new[name], unique_indices=True)
                for name, array in state.items()
            }
            outputs = put_rows(outputs, rows, valid, output)
            return state, outputs, done.at[requests].add(sizes)

        state, outputs, done = while_loop(goes_on, trip, (state, outputs, done))
    return state, outputs


def _cut(rows: Rows, done: jax.Array, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """Return the rows i32[lanes, C] of the next pieces, and the pieces' sizes.

    A piece ends at the next multiple of `chunk_size`, or where the request does.
    """
    position = done if rows.first_positions is None else rows.first_positions + done
    room = chunk_size - position % chunk_size
    sizes = jnp.minimum(rows.counts - done, room)
    numbers = jnp.arange(chunk_size, dtype=jnp.int32)
    return (rows.starts + done)[:, None] + numbers[None, :], sizes
