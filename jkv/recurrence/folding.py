"""fold_rows: the states of many sequences after the rows of one step.

A step mixes sequences that read one token with prompts that read many, packed in rows.
Single tokens are read side by side, in one pass. What prompts add is done in trips that
are counted at run time, so that a step without prompts pays nothing for them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jkv.recurrence.alike import fold_alike
from jkv.recurrence.pieces import Long, fold_pieces
from jkv.recurrence.rules import Arrays, ChunkRule, Rule, keep_where, trace_output
from jkv.recurrence.tokens import fold_one, fold_tokens
from jkv.sharding.loops import when

# Without a form for pieces, requests of up to so many rows are read side by side.
FEW = 8


def fold_rows(
    # `(state, input) -> (state, output)` for one token of one sequence, dicts of
    # arrays; the output is a pytree of arrays
    rule: Rule,
    state: Arrays,  # {name: [B, ...]}, before the rows
    inputs: Arrays,  # {name: [R, ...]}
    starts: jax.Array,  # i32[B], the first row of each request
    counts: jax.Array,  # i32[B], how many it has; 0 leaves its state as it is
    *,
    # `(state, inputs, count) -> (state, outputs)` for one sequence: the first `count`,
    # i32[], of the tokens {name: [C, ...]}; the inputs past those are zeros, and
    # outputs [C, ...] past those are dropped. None: `rule` reads all
    chunk_rule: ChunkRule | None = None,
    chunk_size: int = 64,  # C, the most tokens that `chunk_rule` reads at once
    # i32[B], the position of each request's first row
    first_positions: jax.Array | None = None,
    # read every row by `rule`, in passes of one shape: its bits do not depend on the
    # rows that its own request has in this call either
    alike: bool = False,
    # False: the states of requests without rows may become anything, since nobody reads
    # them
    keeps_idle: bool = True,
) -> tuple[Any, Arrays]:
    """Fold a rule over the rows of each request, in their order.

    Request b owns the rows `starts[b] .. starts[b] + counts[b] - 1`. Which of the two
    forms reads a request, and where its pieces end, depends on its own rows alone: a
    single row is read by `rule`, several are by `chunk_rule` in pieces of `chunk_size`,
    the first from their first row on. With `first_positions` pieces end at
    positions that are multiples of `chunk_size`, wherever the request begins. The two
    forms, and other cuts, differ by rounding. Rows and states of other requests are
    never let through, whatever they hold.

    Returns:
      The outputs, a pytree of [R, ...], zeros in rows of no request; and the states
      after each request's last row, in the dtypes they came in.

    Raises:
      ValueError: for a chunk size below 1, or a rule that returns another state than it
        was given.

    Example:
      A sum that halves with every token, of one request with two rows and one with one:

      >>> import jax.numpy as jnp
      >>> from jkv.recurrence import fold_rows
      >>> def rule(state, given):
      ...     total = state["sum"] / 2 + given["x"]
      ...     return {"sum": total}, total
      >>> outputs, state = fold_rows(
      ...     rule, {"sum": jnp.array([8.0, 4.0])}, {"x": jnp.array([1.0, 2.0, 3.0])},
      ...     jnp.array([0, 2]), jnp.array([2, 1]))
      >>> outputs.tolist(), state["sum"].tolist()
      ([5.0, 4.5, 5.0], [4.5, 5.0])
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if first_positions is None:
        first_positions = jnp.zeros_like(counts)
    call = state, inputs, starts, counts, first_positions
    state, inputs, starts, counts, first_positions = jax.tree.map(jnp.asarray, call)
    num_rows, num_requests = next(iter(inputs.values())).shape[0], counts.shape[0]
    outputs = _empty_outputs(rule, state, inputs, num_rows)
    if not num_rows or not num_requests:
        return outputs, state
    if alike:
        state, outputs = fold_alike(rule, state, outputs, inputs, starts, counts)
        return outputs, state
    few = 1 if chunk_rule else FEW
    is_long = counts > few
    valid = (counts > 0) & ~is_long
    before = [] if keeps_idle else [*state.values()]
    state, outputs = fold_one(
        rule, state, outputs, inputs, starts, valid, keeps_others=keeps_idle
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
            short = jnp.where(is_long, 0, counts)
            carry = fold_tokens(rule, *carry, inputs, starts, short, first=1)
        if not most:
            return carry
        long = Long(starts, jnp.where(is_long, counts, 0), first_positions)
        size = chunk_size if chunk_rule else num_rows
        piece_rule = chunk_rule or _read_by_tokens(rule)
        return fold_pieces(piece_rule, *carry, inputs, long, size, most)

    several, carry = (counts > 1).any(), (state, outputs)
    state, outputs = when(several, fold_others, carry, counts, *before)
    return outputs, state


def _read_by_tokens(rule: Rule) -> ChunkRule:
    """Return a form for pieces that reads one token after the other."""

    def chunk_rule(
        state: Arrays, inputs: Arrays, count: jax.Array
    ) -> tuple[Arrays, Any]:
        lane = {name: array[None] for name, array in state.items()}
        num_rows = next(iter(inputs.values())).shape[0]
        outputs = _empty_outputs(rule, lane, inputs, num_rows)
        start = jnp.zeros(1, jnp.int32)
        lane, outputs = fold_tokens(rule, lane, outputs, inputs, start, count[None])
        return {name: array[0] for name, array in lane.items()}, outputs

    return chunk_rule


def _empty_outputs(rule: Rule, state: Arrays, inputs: Arrays, num_rows: int) -> Any:
    """Return zeros for what a rule puts out, a pytree of [R, ...]."""
    output = trace_output(rule, state, inputs)
    return jax.tree.map(
        lambda leaf: jnp.zeros((num_rows, *leaf.shape), leaf.dtype), output
    )
