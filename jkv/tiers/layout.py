"""How rows lie in blocks and states: what a value outside a cache must know of it."""

import json
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from jkv.state import Cache

# Name, dtype, layers, and the shape of one block or one state.
ArrayKind = tuple[Any, ...]


class GroupLayout(NamedTuple):
    """Of a group with blocks."""

    dtype: str  # that the stored bits of keys mean
    value_dtype: str  # likewise of values
    arrays: tuple[ArrayKind, ...]


class StateLayout(NamedTuple):
    """Of a group with a state."""

    rows: tuple[ArrayKind, ...]
    inputs: tuple[ArrayKind, ...]


class Layout(NamedTuple):
    """Of a cache."""

    block_size: int
    groups: tuple[GroupLayout, ...]
    states: tuple[StateLayout, ...]

    @classmethod
    def of(cls, cache: Cache) -> Self:
        groups = []
        for storage in cache.block_storage:
            kinds = tuple(
                (
                    *(name, str(pool.dtype), pool.shape[0]),
                    *(storage.num_kv_heads, *pool.shape[3:]),
                )
                for name, pool in storage.arrays.items()
            )
            dtypes = str(storage.dtype), str(storage.value_dtype)
            groups.append(GroupLayout(*dtypes, kinds))
        states = tuple(
            StateLayout(_kinds(each.snapshot_rows), _kinds(each.snapshot_inputs))
            for each in cache.storage
            if each.kind == "states"
        )
        return cls(cache.block_size, tuple(groups), states)

    def to_json(self) -> str:
        """Return the layout as text, the same for the same layout."""
        return json.dumps(self)

    @classmethod
    def of_json(cls, text: str) -> Self:
        block_size, groups, states = _as_tuples(json.loads(text))
        return cls(
            block_size,
            tuple(GroupLayout(*each) for each in groups),
            tuple(StateLayout(*each) for each in states),
        )

    def differences(self, other: Self) -> list[str]:
        """Say in what this layout differs from another, that of a cache."""
        found = []
        parts: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
            "groups with blocks": (self.groups, other.groups, GroupLayout._fields),
            "groups with a state": (self.states, other.states, StateLayout._fields),
        }
        for name, (mine, theirs, fields) in parts.items():
            if len(mine) != len(theirs):
                found.append(f"{name}: {len(mine)}, in this cache {len(theirs)}")
            for number, pair in enumerate(zip(mine, theirs, strict=False)):
                found += [
                    f"{name}, {number}: {field} is {a}, in this cache {b}"
                    for field, a, b in zip(fields, *pair, strict=True)
                    if a != b
                ]
        if self.block_size != other.block_size:
            found.append(
                f"block_size is {self.block_size}, in this cache {other.block_size}"
            )
        return found


def empty(kind: ArrayKind) -> np.ndarray:
    """Return an array of a kind, [L, 0, ...]: of no block."""
    _, dtype, num_layers, *shape = kind
    return np.zeros((num_layers, 0, *shape), jnp.dtype(dtype))


def _kinds(arrays: dict[str, Any]) -> tuple[ArrayKind, ...]:
    return tuple(
        (name, str(array.dtype), array.shape[0], *array.shape[2:])
        for name, array in sorted(arrays.items())
    )


def _as_tuples(found: Any) -> Any:
    return tuple(map(_as_tuples, found)) if isinstance(found, list) else found
