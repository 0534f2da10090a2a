"""fold_state: fold a one-token rule over the states of a step's sequences."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jkv.arguments import as_array, explains_arguments
from jkv.operations import when
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
from jkv.sharding.explicit_axes import call_on_auto_axes, spec_of
from jkv.sharding.storage_sharding import find_typed_mesh
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
    """Fold a rule over a step's rows, from the state of each sequence.

    This is the whole cache interaction of a recurrent-state layer in a step: it reads
    the state and the pending tokens, folds tokens that are no longer pending, then the
    rows, and writes the state before the tokens that remain pending. `rule` processes
    single and pending tokens, `chunk_rule` several at once, in pieces that end at
    multiples of `chunk_size`; the choice, and so the rounding, depends only on the rows
    of the same sequence (`jkv.recurrence.fold_rows`). In batch-invariant steps
    (`Batch.by_position`) `rule` processes all rows. Storing the inputs of pending
    tokens instead of further states is the idea of ReplaySSM
    (https://dao-lab.ai/blog/2026/replayssm/).

    Args:
      cache: the cache that `append` returned with the batch, or a later one.
      layer: int, index in the model; or as for `read_state`.
      batch: the plan from `append`.
      rule: `(state, input) -> (state, output)` for one token of one sequence. State and
        input are dicts of arrays, without an axis of sequences or tokens; the state has
        the arrays of `StateConfig`, and the output is a pytree of arrays.
      inputs: {name: [R, *shape]}, inputs of the rows. The arrays named in
        `StateConfig.inputs` are stored while a row is pending, and must determine the
        state: when tokens are folded again, all other inputs are zeros.
      chunk_rule: `(state, inputs, count) -> (state, outputs)` for many tokens of one
        sequence at once: inputs {name: [C, *shape]}, of which the first `count`, i32[],
        are tokens and the rest zeros; outputs [C, ...], dropped past the count.
      chunk_size: C.

    Returns:
      The outputs, a pytree of [R, ...], zeros in invalid rows; and the cache with the
      new states. Under jit with donation they are updated in place.

    Raises:
      ValueError: if the rule returns another state structure, `inputs` lacks one of
        `StateConfig.inputs`, and as `read_state`.

    Example:
      An exponential moving average of the inputs:

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
    inputs = {name: as_array(rows) for name, rows in inputs.items()}
    found, options = cache.find_state(layer), (rule, chunk_rule, chunk_size)
    storage = cache.storage[found.group]
    mesh = find_typed_mesh((storage, inputs))
    if mesh is None:
        return _fold(cache, layer, batch, inputs, *options)

    def fold(cache: Cache, *given: Any) -> tuple[Any, StateStorage]:
        layer, batch, inputs = given
        outputs, cache = _fold(cache, layer, batch, inputs, *options)
        return outputs, cache.storage[found.group]

    of_outputs = _find_specs(rule, storage, inputs, mesh)
    specs = of_outputs, jax.tree.map(spec_of, storage)
    given = cache, found, batch, inputs
    outputs, storage = call_on_auto_axes(fold, mesh, given, {}, specs)
    return outputs, cache.with_group_storage(found.group, storage)


def _find_specs(rule: Rule, storage: StateStorage, inputs: Arrays, mesh: Any) -> Any:
    """Return the PartitionSpecs of a rule's outputs on a mesh with Explicit axes.

    They follow from the types of the state and the inputs, or are replicated if the
    rule has an operation whose type JAX cannot resolve.
    """

    def one(array: jax.Array, skipped: int, dtype: Any) -> jax.ShapeDtypeStruct:
        spec = jax.sharding.PartitionSpec(*spec_of(array)[skipped:])
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(array.shape[skipped:], dtype, sharding=sharding)

    pairs = zip(sorted(storage.rows.items()), storage.row_dtypes, strict=True)
    state = {name: one(array, 2, dtype) for (name, array), dtype in pairs}
    given = {name: one(rows, 1, rows.dtype) for name, rows in inputs.items()}
    of_rows = next((spec_of(rows)[0] for rows in inputs.values()), None)

    def with_rows(output: Any) -> jax.sharding.PartitionSpec:
        spec = output.sharding.spec
        is_free = {*jax.tree.leaves(of_rows)}.isdisjoint(jax.tree.leaves([*spec]))
        return jax.sharding.PartitionSpec(of_rows if is_free else None, *spec)

    try:
        return jax.tree.map(with_rows, jax.eval_shape(rule, state, given)[1])
    except Exception:
        return jax.sharding.PartitionSpec()


def _fold(
    cache: Cache,
    layer: Layer,
    batch: Batch,
    inputs: Arrays,
    rule: Rule,
    chunk_rule: ChunkRule | None,
    chunk_size: int,
) -> tuple[Any, Cache]:
    """Fold a rule over a step's rows, without Explicit axes."""
    state = read_state(cache, layer, batch)
    storage = cache.storage[cache.find_state(layer).group]
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
        # Idle states are not written. A request with only pending rows is: its state
        # precedes them.
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
    """Tokens of each request by their role in a step, i32[B].

    All are 0 for requests without rows.
    """

    settled: jax.Array  # pending before the step, not after it; the first ones
    stay: jax.Array  # pending before and after the step; the later ones
    new: jax.Array  # pending rows of the step, its last ones


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
    """Return states after the tokens that are no longer pending, and the batch.

    The returned batch depends on the loop that reads these tokens, which orders the
    writes after it: without the dependency XLA would copy the inputs of all sequences
    for the loop.
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
    """Return the outputs, including the rows pending after the step.

    The cache has these rows already, after the tokens that stay pending. Their states
    are dropped, as the stored state precedes them, so a step without pending rows has
    no second copy of its states.
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
    """Return the pending inputs of `seq_ids`.

    Inside a loop of zero or one trip the ids are part of the carry, so that the read is
    not hoisted out of steps without trips.
    """
    return read_pending(cache, layer, dataclasses.replace(batch, seq_ids=seq_ids))


def _pick_inputs(storage: StateStorage, inputs: Arrays) -> Arrays:
    """Return the stored inputs of pending rows, in the cache's dtypes."""
    missing = sorted(set(storage.inputs) - set(inputs))
    if missing:
        raise UsageError(
            f"inputs must have the arrays of StateConfig.inputs, "
            f"{sorted(storage.inputs)}; {missing} are missing"
        )
    names = sorted(storage.inputs)
    dtypes = dict(zip(names, storage.input_dtypes, strict=True))
    return {name: inputs[name].astype(dtypes[name]) for name in names}
