"""read_state, read_pending, write_state: states of sequences in recurrent-state layers.

`jkv.fold_state` calls all three; layers that do more than fold a rule call them
directly.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import as_array, expect, name_kind
from jkv.formats.format import as_bits
from jkv.metadata.requests import Integer
from jkv.operations import gather, scatter, when
from jkv.sharding.storage_sharding import update_in_place
from jkv.state import Batch, Cache, GroupLayer, StateStorage
from jkv.state.cache import Role
from jkv.state.entry import any_layer, check_batch, takes_cache
from jkv.state.metadata import Pruning
from jkv.states.copies import read_rows
from jkv.status import Status, UsageError

Layer = Integer | GroupLayer | tuple[GroupLayer, ...]
Arrays = dict[str, jax.Array]


@takes_cache(role=Role.READS_STATE)
def read_state(cache: Cache, layer: Layer, batch: Batch) -> Arrays:
    """Return the state of each request's sequence in a layer.

    Before the step's `write_state` this is the state before the batch's rows. It is the
    state at the sequence's base and excludes pending tokens (`read_pending`).

    Args:
      cache: the cache that `append` returned with the batch, or a later one.
      layer: int, index in the model; or the result of `cache.find_periodic`. May be
        traced if all layers are in one group.
      batch: the plan from `append`.

    Returns:
      By name [B, *shape], in the dtype of `StateConfig.arrays`. Zeros for a sequence
      without tokens before its base, for padding and for a refused request.

    Raises:
      ValueError: if the layer has no state, the batch belongs to a cache of other
        sizes, or the cache has no storage.

    Example:
      >>> import jkv
      >>> config = jkv.StateConfig(num_layers=2, arrays={"sum": ((3,), "float32")},
      ...     max_sequences=2, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids)
      >>> state = jkv.read_state(cache, 1, batch)
      >>> cache = jkv.write_state(cache, 1, batch, {"sum": state["sum"] + 1})
      >>> jkv.read_state(cache, 1, batch)["sum"].tolist()
      [[1.0, 1.0, 1.0]]
    """
    found, storage = _find(cache, layer, batch)
    return _read(
        storage.rows,
        storage.bases,
        any_layer(found.layer, batch),
        _list_rows(batch, storage),
        dtypes=storage.row_dtypes,
    )


@takes_cache(role=Role.READS_STATE)
def read_pending(cache: Cache, layer: Layer, batch: Batch) -> Arrays:
    """Return the inputs of the tokens that were pending before the step.

    Fold them into the state of `read_state` before the batch's rows.

    Args:
      cache: the cache that `append` returned with the batch, before `write_state`.
      layer: as for `read_state`.
      batch: the plan from `append`.

    Returns:
      By name [B, Q, *shape], oldest first, in the dtype of `StateConfig.inputs`; zeros
      past `batch.pending_before`. Empty without `max_pending`.

    Raises:
      ValueError: as `read_state`.

    Example:
      >>> import jkv
      >>> config = jkv.StateConfig(num_layers=1, arrays={"sum": ((3,), "float32")},
      ...     max_sequences=2, max_context_length=16, max_pending=4,
      ...     inputs={"x": ((3,), "float32")})
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids)
      >>> jkv.read_pending(cache, 0, batch)["x"].shape
      (1, 4, 3)
    """
    found, storage = _find(cache, layer, batch)
    return _read_inputs(
        storage.inputs,
        any_layer(found.layer, batch),
        _list_rows(batch, storage),
        batch.pending_before,
        dtypes=storage.input_dtypes,
    )


@takes_cache(role=Role.WRITES_STATE)
def write_state(
    cache: Cache,
    layer: Layer,
    batch: Batch,
    state: Mapping[str, jax.Array],
    inputs: Mapping[str, jax.Array] | None = None,
) -> Cache:
    """Store the state of each request's sequence after the step.

    Requests without rows keep their state. Before this call a row holds the state
    before the step: call it for every layer before truncating the step.

    Args:
      cache: the cache that `append` returned with the batch, or a later one.
      layer: as for `read_state`.
      batch: the plan from `append`.
      state: by name [B, *shape], in the dtype of `StateConfig.arrays`: after each
        request's last row, or, with `max_pending`, after its first
        `context_lengths - pending_after` tokens.
      inputs: with `max_pending`, by name [R, *shape], inputs of each row, in the dtype
        of `StateConfig.inputs`. Inputs of pending rows are stored.

    Returns:
      The new cache. Under jit with donation the states are updated in place.

    Raises:
      ValueError: if names, shapes or dtypes are wrong, and as `read_state`.

    Example:
      >>> import jkv
      >>> config = jkv.StateConfig(num_layers=1, arrays={"sum": ((3,), "float32")},
      ...     max_sequences=2, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids)
      >>> cache = jkv.write_state(cache, 0, batch, jkv.read_state(cache, 0, batch))
    """
    found, storage = _find(cache, layer, batch)
    if batch.is_second:
        raise ValueError(
            "batch must come from append, as a state is written once per step, got a "
            "batch of with_mask; write states with the batch of append"
        )
    given = dict(inputs or {})
    _check_arrays("state", storage.rows, storage.row_dtypes, state, len(batch.seq_ids))
    _check_arrays("inputs", storage.inputs, storage.input_dtypes, given, batch.num_rows)
    storage = update_in_place(
        _write,
        storage,
        any_layer(found.layer, batch),
        batch,
        cache.metadata.sequences.pruned,
        {name: as_array(rows) for name, rows in state.items()},
        {name: as_array(rows) for name, rows in given.items()},
    )
    return cache.with_group_storage(found.group, storage)


def _find(cache: Cache, layer: Layer, batch: Batch) -> tuple[GroupLayer, StateStorage]:
    """Return the place of a layer's state; refuse other layers and batches."""
    if cache.num_layers == 0:
        raise ValueError(
            "this cache has no storage (init(..., storage=False)); create one with "
            "storage to read or write states"
        )
    found = cache.find_state(layer)
    check_batch(cache, batch)
    if batch.mask is not None and batch.mask.reads_only:
        raise ValueError(
            "batch must come from append, got a batch of peek, whose rows are not "
            "folded into states; read the state with the next append"
        )
    return found, cache.storage[found.group]


def _check_arrays(
    what: str,
    stored: Arrays,
    dtypes: tuple[np.dtype[Any], ...],
    given: Mapping[str, jax.Array],
    count: int,
) -> None:
    """Refuse arrays other than the configured ones, one for each of `count`."""
    if not isinstance(given, Mapping) or set(given) != set(stored):
        names = sorted(given) if isinstance(given, Mapping) else name_kind(given)
        raise UsageError(
            f"{what} must have the arrays of StateConfig, {sorted(stored)}, got {names}"
        )
    is_state = what == "state"
    for (name, array), dtype in zip(sorted(stored.items()), dtypes, strict=True):
        first, skipped, one = ("B", 2, "sequence") if is_state else ("R", 3, "token")
        axes = " ".join([first, *map(str, array.shape[skipped:])])
        why = f"as StateConfig says of one {one}"
        value, sizes = as_array(given[name]), {first: count}
        expect(f"{what}[{name!r}]", value, axes, sizes, dtype, why=why)


def _list_rows(batch: Batch, storage: StateStorage) -> jax.Array:
    """Return the row of each served request, i32[B], S for others and padding."""
    is_served = (batch.status == Status.OK) & (batch.seq_ids >= 0)
    return jnp.where(is_served, batch.seq_ids, storage.bases.shape[1])


@functools.partial(jax.jit, static_argnames="dtypes")
def _read(
    rows: Arrays,
    bases: jax.Array,
    layer: jax.Array,
    row: jax.Array,
    *,
    dtypes: tuple[np.dtype[Any], ...],
) -> Arrays:
    # The row of an empty sequence is stale: it reads as zeros.
    base = gather(bases, (layer, row), fill=0)
    found = read_rows(rows, layer, row, base == 0)
    return {
        name: as_bits(state, dtype)
        for (name, state), dtype in zip(sorted(found.items()), dtypes, strict=True)
    }


@functools.partial(jax.jit, static_argnames="dtypes")
def _read_inputs(
    inputs: Arrays,
    layer: jax.Array,
    row: jax.Array,
    count: jax.Array,
    *,
    dtypes: tuple[np.dtype[Any], ...],
) -> Arrays:
    found = {}
    for (name, array), dtype in zip(sorted(inputs.items()), dtypes, strict=True):
        pending = as_bits(gather(array, (layer, row), fill=0), dtype)
        place = jnp.arange(pending.shape[1], dtype=jnp.int32)[None]
        is_pending = _along(place < count[:, None], pending)
        found[name] = jnp.where(is_pending, pending, jnp.zeros_like(pending))
    return found


@jax.jit
def _write(
    storage: StateStorage,
    layer: jax.Array,
    batch: Batch,
    pruned: Pruning,
    state: Arrays,
    inputs: Arrays,
) -> StateStorage:
    grows, no_row = batch.query_lengths > 0, storage.bases.shape[1]
    row = jnp.where(grows, batch.seq_ids, no_row)
    # Distinct indices for dropped rows, so that indices are unique.
    request = jnp.arange(row.shape[0], dtype=jnp.int32)
    row = jnp.where(grows, row, no_row + request)

    def put(array: jax.Array, rows: jax.Array, row: jax.Array) -> jax.Array:
        rows = as_bits(rows, array.dtype)
        return scatter(array, (layer, row), rows, unique=True)

    base = batch.context_lengths - batch.pending_after
    base = pruned.positions_of(batch.seq_ids, base)
    storage = dataclasses.replace(
        storage,
        bases=put(storage.bases, base, row),
        rows={name: put(storage.rows[name], state[name], row) for name in storage.rows},
    )
    if not storage.inputs:
        return storage
    count = jnp.where(grows, batch.pending_after, 0)
    # Number of tokens pending before and after the step.
    old = jnp.maximum(count - batch.query_lengths, 0)
    skipped = batch.pending_before - old
    first = batch.query_starts + batch.query_lengths - count

    def keep(kept: Arrays, row: jax.Array) -> Arrays:
        most = next(iter(kept.values())).shape[2]
        place = jnp.arange(most, dtype=jnp.int32)[None]
        is_new = (place >= old[:, None]) & (place < count[:, None])
        source = jnp.where(is_new, first[:, None] + place, batch.num_rows)
        earlier = jnp.minimum(place + skipped[:, None], most - 1)

        def choose(array: jax.Array, given: jax.Array) -> jax.Array:
            new = gather(given, source, fill=0)
            before = gather(array, (layer, row[:, None], earlier))
            new = as_bits(new, array.dtype)
            return jnp.where(_along(is_new, new), new, before)

        return {
            name: put(array, choose(array, inputs[name]), row)
            for name, array in kept.items()
        }

    # A step without pending tokens stores no inputs.
    kept = when(jnp.any(count > 0), keep, storage.inputs, row)
    return dataclasses.replace(storage, inputs=kept)


def _along(mask: jax.Array, array: jax.Array) -> jax.Array:
    """Reshape a mask of the leading axes to broadcast over an array."""
    return mask.reshape(mask.shape + (1,) * (array.ndim - mask.ndim))
