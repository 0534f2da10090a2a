"""Swapped-out states: copied from rows to the host, and back into other rows."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.sharding.processes import bring
from jkv.state import Cache, StateStorage


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SwappedStates:
    """States of B sequences in one group of recurrent-state layers, on the host."""

    kind = "states"
    num_blocks = num_filled_blocks = 0

    bases: np.ndarray  # i32[L, B], as in `StateStorage`
    rows: dict[str, np.ndarray]  # by name [L, B, ...], likewise
    inputs: dict[str, np.ndarray]  # by name [L, B, Q, ...], likewise

    def encoded_dtype(self, _path: str) -> None:
        """Return None: bits are written unchanged."""

    def fits(self, _columns: int) -> bool:
        return True

    def to_enter(self, _columns: int) -> None:
        """Return None: states need no block tables."""

    def compare(
        self, cache: Cache, number: int, _lengths: np.ndarray
    ) -> dict[str, tuple[Any, Any]]:
        storage = cache.storage[number]
        return {
            f"{part} of its state": (
                _describe(getattr(self, part)),
                _describe(getattr(storage, part)),
            )
            for part in ("rows", "inputs")
        }

    def put(
        self,
        cache: Cache,
        number: int,
        seq_ids: np.ndarray,
        _tables: object,
        *,
        donate: bool,
    ) -> Cache:
        storage = cache.storage[number]
        if not storage.num_layers:
            return cache
        put = _put_donated if donate else _put
        return cache.with_group_storage(number, put(storage, self, seq_ids))


def fetch_states(storage: StateStorage, rows: np.ndarray) -> SwappedStates:
    """Copy the states of rows, i32[B], to the host, or from a file's numpy arrays."""
    arrays = storage.bases, storage.rows, storage.inputs
    if isinstance(storage.bases, np.ndarray):
        found: Any = jax.tree.map(lambda array: array[:, rows], arrays)
    else:
        found = bring(_gather(arrays, rows))
    return SwappedStates(bases=found[0], rows=found[1], inputs=found[2])


def _describe(arrays: dict[str, Any]) -> str:
    """Describe dtype and shape of one row of arrays [L, rows, ...]."""
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
