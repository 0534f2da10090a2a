"""fold_rows: update the recurrent states of many sequences with a step's rows.

A step mixes decoding sequences of one token with prompts of many, packed in rows.
Single tokens are computed in one batched pass. The rest of the prompts is computed in
loops with a dynamic trip count, so that a step without prompts skips it.

Padding every request to the longest prompt would waste most of the work. Each trip
therefore takes the few requests with the most rows left, and one chunk of each. The
loop runs in a wide and a narrow form: the last prompt is computed alone.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jkv.operations import when, while_loop
from jkv.recurrence.rules import (
    Arrays,
    ChunkRule,
    Rows,
    Rule,
    empty_outputs,
    keep_where,
    put_rows,
    take_rows,
)
from jkv.recurrence.tokens import fold_one, fold_tokens

# Without a chunk rule, requests of up to this many rows are folded in lockstep.
FEW = 8

# Requests per trip of the wide form: enough to fill a GPU with their heads, few
# enough that two prompts waste little.
LANES = 4


def fold_rows(
    rule: Rule,
    state: Arrays,  # {name: [B, ...]}, before the rows
    inputs: Arrays,  # {name: [R, ...]}
    rows: Rows,
    *,
    chunk_rule: ChunkRule | None = None,  # None to use `rule` only
    chunk_size: int = 64,  # C, most tokens per call of `chunk_rule`
    # If False, the states of requests without rows are undefined.
    keeps_idle: bool = True,
) -> tuple[Any, Arrays]:
    """Fold a rule over the rows of each request, in order.

    The form used for a request and its chunk boundaries depend on its own rows only:
    `rule` computes a single row, `chunk_rule` several, in chunks that end at positions
    which are multiples of `chunk_size`. The two forms, and other boundaries, differ by
    rounding. Rows and states of other requests have no influence, even if they are NaN.

    Returns:
      The outputs, a pytree of [R, ...], zeros in rows of no request; and the states
      after each request's last row, in their input dtypes.

    Raises:
      ValueError: for a chunk size below 1, or a rule that changes the state's
        structure.

    Example:
      A sum that halves with every token, of one request with two rows and one with one:

      >>> import jax.numpy as jnp
      >>> from jkv.recurrence import Rows, fold_rows
      >>> def rule(state, given):
      ...     total = state["sum"] / 2 + given["x"]
      ...     return {"sum": total}, total
      >>> outputs, state = fold_rows(
      ...     rule, {"sum": jnp.array([8.0, 4.0])}, {"x": jnp.array([1.0, 2.0, 3.0])},
      ...     Rows(starts=jnp.array([0, 2]), counts=jnp.array([2, 1])))
      >>> outputs.tolist(), state["sum"].tolist()
      ([5.0, 4.5, 5.0], [4.5, 5.0])
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be >= 1, got {chunk_size}")
    state, inputs, rows = jax.tree.map(jnp.asarray, (state, inputs, rows))
    num_rows, num_requests = next(iter(inputs.values())).shape[0], rows.counts.shape[0]
    outputs = empty_outputs(rule, state, inputs)
    if not num_rows or not num_requests:
        return outputs, state
    few = 1 if chunk_rule else FEW
    is_long = rows.counts > few
    valid = (rows.counts > 0) & ~is_long
    before = [] if keeps_idle else [*state.values()]
    state, outputs = fold_one(
        rule, state, outputs, inputs, rows.starts, valid, keeps_others=keeps_idle
    )
    if num_rows == 1:
        return outputs, state
    most = min(num_requests, num_rows // (few + 1))

    def fold_others(
        carry: tuple[Arrays, Any], counts: jax.Array, *before: jax.Array
    ) -> tuple[Arrays, Any]:
        if before:
            state, outputs = carry
            old = dict(zip(state, before, strict=True))
            carry = keep_where(is_long, old, state), outputs
        if chunk_rule is None:
            short = rows._replace(counts=jnp.where(is_long, 0, counts))
            carry = fold_tokens(rule, *carry, inputs, short, first=1)
        if not most:
            return carry
        long = rows._replace(counts=jnp.where(is_long, counts, 0))
        size = chunk_size if chunk_rule else num_rows
        piece_rule = chunk_rule or _read_by_tokens(rule)
        return _fold_pieces(piece_rule, *carry, inputs, long, size, most)

    several, carry = (rows.counts > 1).any(), (state, outputs)
    state, outputs = when(several, fold_others, carry, rows.counts, *before)
    return outputs, state


def _read_by_tokens(rule: Rule) -> ChunkRule:
    """Return a chunk rule that applies `rule` token by token."""

    def chunk_rule(
        state: Arrays, inputs: Arrays, count: jax.Array
    ) -> tuple[Arrays, Any]:
        lane = {name: array[None] for name, array in state.items()}
        outputs = empty_outputs(rule, lane, inputs)
        whole = Rows(jnp.zeros(1, jnp.int32), count[None])
        lane, outputs = fold_tokens(rule, lane, outputs, inputs, whole)
        return {name: array[0] for name, array in lane.items()}, outputs

    return chunk_rule


def _fold_pieces(
    chunk_rule: ChunkRule,  # over some tokens of one sequence
    state: Arrays,  # {name: [B, ...]}
    outputs: Any,  # a pytree of [R, ...]
    inputs: Arrays,  # {name: [R, ...]}
    long: Rows,  # rows of long requests; counts of others are 0
    chunk_size: int,  # C, tokens per chunk
    most: int,  # most requests that can be long, by the shapes
) -> tuple[Arrays, Any]:
    """Fold the rows of long requests, one chunk of a few requests per trip."""
    done = jnp.zeros_like(long.counts)
    for lanes in (min(LANES, most), 1) if most > 1 else (1,):
        # The narrow form computes a single remaining request.
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
    """Return the rows of the next chunks, i32[lanes, C], and their sizes."""
    position = done if rows.first_positions is None else rows.first_positions + done
    room = chunk_size - position % chunk_size
    sizes = jnp.minimum(rows.counts - done, room)
    numbers = jnp.arange(chunk_size, dtype=jnp.int32)
    return (rows.starts + done)[:, None] + numbers[None, :], sizes
