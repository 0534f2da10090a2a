"""Copies of states: between rows, and between rows and snapshots."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.operations import for_each_of, fori_loop, gather, scatter
from jkv.state import StateStorage

Arrays = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StateMoves:
    """Moves of states to rows in one call, one per request.

    Targets are distinct. Sources are read as before the call.
    """

    target: jax.Array  # i32[B], the row, S for none
    base: jax.Array  # i32[B], the base of the new state; 0: an empty state
    source: jax.Array | None = None  # i32[B], the source row, S for none
    snapshot_id: jax.Array | None = None  # i32[B], the source snapshot, P for none
    # Static: True if a source may be the target of another request.
    is_exchange: bool = dataclasses.field(default=False, metadata={"static": True})


class SnapshotCopies(NamedTuple):
    """Copies of rows' states to snapshots in one call."""

    rows: jax.Array  # i32[B]
    places: jax.Array  # i32[B], P for none


def move_states(storage: StateStorage, moves: StateMoves) -> StateStorage:
    """Return a group's states moved; outside jit skip the pass without targets."""
    if not storage.num_layers or not _has_any(moves.target, storage.bases.shape[1]):
        return storage
    return _move(storage, moves)


def copy_to_snapshots(storage: StateStorage, copies: SnapshotCopies) -> StateStorage:
    """Return a group with rows' states copied to snapshots, if there are any."""
    places = next(iter(storage.snapshot_rows.values())).shape[1]
    if not storage.num_layers or not _has_any(copies.places, places):
        return storage
    return _snap(storage, *copies)


def read_rows(
    arrays: Arrays, layer: jax.Array, rows: jax.Array, is_empty: jax.Array
) -> Arrays:
    """Return rows of a layer, i32[B], zeros for empty ones, bool[B].

    XLA on CPU would compute the zeros in another pass over all rows, as it fuses
    nothing into this gather. There a loop writes the zeros of the few empty rows.
    """

    def clear(arrays: Arrays) -> Arrays:
        found = {name: gather(array, (layer, rows)) for name, array in arrays.items()}

        def clear_one(request: jax.Array, found: Arrays) -> Arrays:
            return {name: array.at[request].set(0) for name, array in found.items()}

        return for_each_of(is_empty, clear_one, found)

    def fill(arrays: Arrays) -> Arrays:
        def get(array: jax.Array) -> jax.Array:
            row = jnp.where(is_empty, array.shape[1], rows)
            return gather(array, (layer, row), fill=0)

        return jax.tree.map(get, arrays)

    return jax.lax.platform_dependent(arrays, cpu=clear, default=fill)


def _has_any(numbers: jax.Array, none: int) -> bool:
    """Return True if a number is below `none`, or may be, inside jit."""
    if isinstance(numbers, jax.core.Tracer):
        return True
    return bool(np.any(np.asarray(numbers) < none))


@jax.jit
def _move(storage: StateStorage, moves: StateMoves) -> StateStorage:
    bases = storage.bases.at[:, moves.target].set(moves.base[None], mode="drop")
    return dataclasses.replace(
        storage,
        bases=bases,
        rows=_move_rows(storage.rows, storage.snapshot_rows, moves),
        inputs=_move_rows(storage.inputs, storage.snapshot_inputs, moves),
    )


def _move_rows(arrays: Arrays, snapshots: Arrays, moves: StateMoves) -> Arrays:
    """Return rows after the moves, from rows and snapshots."""
    if not arrays:
        return arrays
    if moves.source is not None:
        arrays = _copy_rows(arrays, moves, moves.source)
    if moves.snapshot_id is not None and snapshots:
        arrays = _copy(arrays, snapshots, moves.target, moves.snapshot_id)
    return arrays


def _copy_rows(arrays: Arrays, moves: StateMoves, source: jax.Array) -> Arrays:
    """Copy rows to rows; an exchange reads all sources before any target is written."""
    if not moves.is_exchange:
        return _copy(arrays, arrays, moves.target, source)
    num_layers, num_rows = next(iter(arrays.values())).shape[:2]
    target = jnp.where(source < num_rows, moves.target, num_rows)

    # One layer at a time, so that only its rows are in flight.
    def exchange(layer: jax.Array, arrays: Arrays) -> Arrays:
        def each(array: jax.Array) -> jax.Array:
            rows = gather(array, (layer, source))
            return scatter(array, (layer, target), rows, unique=True)

        return jax.tree.map(each, arrays)

    is_any = jnp.any(source < num_rows)
    trips = jnp.where(is_any, jnp.int32(num_layers), 0)
    return fori_loop(jnp.int32(0), trips, exchange, arrays)


def _copy(
    arrays: Arrays, sources: Arrays, target: jax.Array, source: jax.Array
) -> Arrays:
    """Copy rows one at a time, i32[B], if target and source exist.

    Arrays and sources, possibly the same, are [L, S, ...] by name; indices past the end
    are skipped.
    """
    if not arrays:
        return arrays
    num_targets = next(iter(arrays.values())).shape[1]
    num_sources = next(iter(sources.values())).shape[1]
    is_same = arrays is sources

    def copy(request: jax.Array, changing: Arrays) -> Arrays:
        read = changing if is_same else sources
        return {
            name: array.at[:, gather(target, request)].set(
                read[name].at[:, gather(source, request)].get(mode="clip"), mode="drop"
            )
            for name, array in changing.items()
        }

    return for_each_of((target < num_targets) & (source < num_sources), copy, arrays)


@jax.jit
def _snap(storage: StateStorage, rows: jax.Array, places: jax.Array) -> StateStorage:
    return dataclasses.replace(
        storage,
        snapshot_rows=_copy(storage.snapshot_rows, storage.rows, places, rows),
        snapshot_inputs=_copy(storage.snapshot_inputs, storage.inputs, places, rows),
    )
