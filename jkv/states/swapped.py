"""States of sequences on the host: copied from their rows, and back into others."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.sharding.processes import bring_whole, is_shared
from jkv.state import Cache, StateStorage


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SwappedStates:
    """What B sequences have in one group of layers with a state, on the host."""

    bases: np.ndarray  # i32[L, B], as in `StateStorage`
    rows: dict[str, np.ndarray]  # by name [L, B, ...], likewise
    inputs: dict[str, np.ndarray]  # by name [L, B, Q, ...], likewise


def fetch_states(storage: StateStorage, rows: np.ndarray) -> SwappedStates:
    """Copy the states of rows, i32[B], to the host.

    Args:
      storage: on a device, or of numpy arrays, as a file gives it.
      rows: i32[B].
    """
    arrays = storage.bases, storage.rows, storage.inputs
    if isinstance(storage.bases, np.ndarray):
        found: Any = jax.tree.map(lambda array: array[:, rows], arrays)
    else:
        found = _gather(arrays, rows)
        shared = any(is_shared(leaf.sharding) for leaf in jax.tree.leaves(found))
        found = jax.tree.map(bring_whole, found) if shared else jax.device_get(found)
    return SwappedStates(bases=found[0], rows=found[1], inputs=found[2])


def put_states(
    cache: Cache, states: tuple[SwappedStates, ...], rows: np.ndarray, *, donate: bool
) -> Cache:
    """Write states from the host to rows, i32[B], all different.

    Args:
      cache: the cache.
      states: of each group.
      rows: i32[B].
      donate: write in place of the old arrays, which are then gone, not in copies.
    """
    put = _put_donated if donate else _put
    given = iter(states)
    return cache.with_storage(
        tuple(
            each if each.has_blocks else put(each, next(given), rows)
            for each in cache.storage
        )
    )


def compare_states(
    states: tuple[SwappedStates, ...], cache: Cache
) -> dict[str, tuple[Any, Any]]:
    """Return what the states of sequences are, there and in a cache, by name."""
    of_cache = [each for each in cache.storage if not each.has_blocks]
    kinds: dict[str, tuple[Any, Any]] = {
        "groups with a state": (len(states), len(of_cache))
    }
    for number, (there, here) in enumerate(zip(states, of_cache, strict=False)):
        for part in ("rows", "inputs"):
            kinds |= {
                f"{part} of state {number}": (
                    _describe(getattr(there, part)),
                    _describe(getattr(here, part)),
                )
            }
    return kinds


def _describe(arrays: dict[str, Any]) -> str:
    """Say what arrays, [L, rows, ...], hold of one row."""
    kinds = {
        name: f"{array.dtype}{[array.shape[0], *array.shape[2:]]}"
        for name, array in sorted(arrays.items())
    }
    return str(kinds)


@jax.jit
def _gather(arrays: Any, rows: jax.Array) -> Any:
    return jax.tree.map(lambda array: array.at[:, rows].get(mode="clip"), arrays)


def _scatter(
    storage: StateStorage, states: SwappedStates, rows: jax.Array
) -> StateStorage:
    def put(array: jax.Array, given: jax.Array) -> jax.Array:
        return array.at[:, rows].set(given, mode="drop", unique_indices=True)

    return dataclasses.replace(
        storage,
        bases=put(storage.bases, jnp.asarray(states.bases)),
        rows=jax.tree.map(put, storage.rows, states.rows),
        inputs=jax.tree.map(put, storage.inputs, states.inputs),
    )


_put = jax.jit(_scatter)
_put_donated = functools.partial(jax.jit, donate_argnums=0)(_scatter)
