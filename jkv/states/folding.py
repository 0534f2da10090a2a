"""fold_state: a rule of one token takes the states of a step's sequences along."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.arguments import as_array, explains_arguments
from jkv.recurrence import (
    Arrays,
    ChunkRule,
    Pending,
    Rows,
    Rule,
    fold_alike,
    fold_rows,
    read_ahead,
    replay,
    trace_output,
)
from jkv.sharding.loops import when
from jkv.state import Batch, Cache, StateStorage
from jkv.states.verbs import Layer, read_pending, read_state, write_state
from jkv.status import UsageError


@explains_arguments
def fold_state(
    cache: Cache,
    layer: Layer,
    batch: Batch,
    rule: Rule,
    inputs: Arrays,
    *,
    chunk_rule: ChunkRule | None = None,
    chunk_size: int = 64,
) -> tuple[Any, Cache]:
    """Fold a rule over a step's rows, from the state that each sequence has.

    All that a layer with a state has to do with the cache in a step: the state and what
    is pending are read, tokens that can no longer be taken back are worked in, then the
    rows, and the state is written as it stands before those that can. Single tokens and
    pending ones are read by `rule`, several by `chunk_rule` in pieces that end at
    positions which are multiples of `chunk_size`; which of the two reads a row, and so
    its rounding, depends on the rows of its own sequence alone
    (`jkv.recurrence.fold_rows`). Where bits must not depend on them either
    (`Batch.by_position`), `rule` reads all. That what may be taken back is kept as
    inputs, not as further states, is the idea of ReplaySSM
    (https://dao-lab.ai/blog/2026/replayssm/).

    Args:
      cache: the cache that `append` returned with the batch, or a later one.
      layer: int, of the model; or as `read_state` takes it.
      batch: the plan.
      rule: `(state, input) -> (state, output)` for one token of one sequence. State and
        input are dicts of arrays, without an axis of sequences or tokens; the state has
        the arrays of `StateConfig`, and the output is a pytree of arrays.
      inputs: {name: [R, *shape]}, what rows bring. Those named in `StateConfig.inputs`
        are kept while a row can be taken back, and the state must follow from them: in
        tokens that are worked in again all others are zeros.
      chunk_rule: `(state, inputs, count) -> (state, outputs)` for many tokens of one
        sequence at once: inputs {name: [C, *shape]}, of which the first `count`, i32[],
        are tokens and the rest zeros; outputs [C, ...], dropped past the count.
      chunk_size: C.

    Returns:
      The outputs, a pytree of [R, ...], zeros in invalid rows; and the cache with the
      new states. Under jit with donation they are updated in place.

    Raises:
      ValueError: for a rule that returns another state than it was given, inputs
        that lack one of `StateConfig.inputs`, and as `read_state`.

    Example:
      A running mean of what tokens bring, which forgets half of it with each:

      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.StateConfig(num_layers=1, arrays={"mean": ((2,), "float32")},
      ...     max_sequences=2, max_context_length=16)
      >>> def rule(state, given):
      ...     mean = (state["mean"] + given["x"]) / 2
      ...     return {"mean": mean}, mean
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids, [3], capacity=4)
      >>> rows = jnp.array([[8.0, 0.0], [4.0, 4.0], [0.0, 8.0], [9.0, 9.0]])
      >>> means, cache = jkv.fold_state(cache, 0, batch, rule, {"x": rows})
      >>> means.tolist()
      [[4.0, 0.0], [4.0, 2.0], [2.0, 5.0], [0.0, 0.0]]
    """
    state = read_state(cache, layer, batch)
    storage = cache.storage[cache.find_state(layer).group]
    inputs = {name: as_array(rows) for name, rows in inputs.items()}
    kept = _pick_inputs(storage, inputs)
    trace_output(rule, state, inputs)
    counts = batch.query_lengths
    if kept:
        pending = _find_pending(batch)
        counts = counts - pending.new
        state, batch = _work_in(cache, layer, batch, rule, pending, state, inputs)
    first_positions = batch.context_lengths - batch.query_lengths
    rows = Rows(batch.query_starts, counts, first_positions)
    if batch.by_position:
        outputs, state = fold_alike(rule, state, inputs, rows)
    else:
        # Idle states are not written. Of a request whose rows can all be taken back,
        # the state is: it stands before them.
        outputs, state = fold_rows(
            rule,
            state,
            inputs,
            rows,
            chunk_rule=chunk_rule,
            chunk_size=chunk_size,
            keeps_idle=bool(kept),
        )
    cache = write_state(cache, layer, batch, state, kept)
    if kept:
        carry = state, outputs
        outputs = _peek(cache, layer, batch, rule, pending, carry, inputs)
    return outputs, cache


class _Counts(NamedTuple):
    """Tokens of each request by what becomes of them in a step, i32[B].

    Requests without rows keep what they have: of theirs all are 0.
    """

    settled: jax.Array  # pending before the step, the first of them; not after it
    stay: jax.Array  # pending before it and after it, the others of them
    new: jax.Array  # rows of the step, its last ones


def _find_pending(batch: Batch) -> _Counts:
    grows = batch.query_lengths > 0
    before = jnp.where(grows, batch.pending_before, 0)
    after = jnp.where(grows, batch.pending_after, 0)
    new = jnp.minimum(after, batch.query_lengths)
    stay = after - new
    return _Counts(before - stay, stay, new)


def _work_in(
    cache: Cache,
    layer: Layer,
    batch: Batch,
    rule: Rule,
    counts: _Counts,
    state: Arrays,
    inputs: Arrays,
) -> tuple[Arrays, Batch]:
    """Return states after the tokens that are pending no more, and the batch.

    What is written by that batch follows from the loop that reads those tokens. XLA
    puts nothing in order that does not follow from each other: it would copy the inputs
    of all sequences, for the loop to read while those of this step are written.
    """

    def work_in(
        carry: tuple[Arrays, jax.Array], seq_ids: jax.Array, settled: jax.Array
    ) -> tuple[Arrays, jax.Array]:
        kept = _read(cache, layer, batch, seq_ids)
        lacking = {name: inputs[name] for name in inputs if name not in kept}
        pending = Pending(kept, jnp.zeros_like(settled), settled)
        state, trips = carry
        return replay(rule, state, pending, lacking), trips + 1

    some = (counts.settled > 0).any()
    begun = state, jnp.int32(0)
    state, trips = when(some, work_in, begun, batch.seq_ids, counts.settled)
    seq_ids = jnp.where(trips < 0, -1, batch.seq_ids)  # trips are 0 or 1
    return state, dataclasses.replace(batch, seq_ids=seq_ids)


def _peek(
    cache: Cache,
    layer: Layer,
    batch: Batch,
    rule: Rule,
    counts: _Counts,
    carry: tuple[Arrays, Any],
    inputs: Arrays,
) -> Any:
    """Return the outputs with those of rows that are pending after the step.

    The cache has them already, behind the tokens that stay pending. The states that
    they lead to are dropped: what is kept stands before them. So a step without such
    rows has no second copy of its states.
    """
    state, outputs = carry
    stay = counts.stay, batch.pending_after
    batch = dataclasses.replace(batch, pending_counts=stay)

    def peek(outputs: Any, seq_ids: jax.Array, new: jax.Array) -> Any:
        kept = _read(cache, layer, batch, seq_ids)
        pending = Pending(kept, jnp.zeros_like(new), counts.stay)
        rows = Rows(batch.query_starts + batch.query_lengths - new, new)
        return read_ahead(rule, state, outputs, pending, inputs, rows)

    some = (counts.new > 0).any()
    return when(some, peek, outputs, batch.seq_ids, counts.new)


def _read(cache: Cache, layer: Layer, batch: Batch, seq_ids: jax.Array) -> Arrays:
    """Return what is pending of sequences which are told as an argument.

    In a loop of no or one trip they are a part of what changes, so that nothing is read
    in front of it, in steps that make none.
    """
    return read_pending(cache, layer, dataclasses.replace(batch, seq_ids=seq_ids))


def _pick_inputs(storage: StateStorage, inputs: Arrays) -> Arrays:
    """Return the inputs that are kept of pending rows, as the cache stores them."""
    missing = sorted(set(storage.inputs) - set(inputs))
    if missing:
        raise UsageError(
            f"inputs must have what StateConfig.inputs names, {sorted(storage.inputs)};"
            f" {missing} are missing"
        )
    names = sorted(storage.inputs)
    dtypes = dict(zip(names, storage.input_dtypes, strict=True))
    return {name: inputs[name].astype(dtypes[name]) for name in names}
