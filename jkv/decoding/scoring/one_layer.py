"""A cache whose groups have a pool for one layer at a time, gathered from the rows.

It stands beside the cache as its watcher: a model writes and attends as ever, and may
do nothing else.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jkv.metadata.requests import Integer
from jkv.sharding.mapping import divided, over_devices
from jkv.sharding.storage_sharding import POOL, ROWS
from jkv.state import Cache, GroupLayer
from jkv.state.cache import Role
from jkv.status import UsageError
from jkv.verbs.arguments import locate_layer
from jkv.verbs.writing import read_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OneLayerAtATime:
    """Has each layer fill the whole pool of its group, and attend to it."""

    slot_rows: jax.Array  # i32[N, T], the row that each slot holds, R for none

    def call(
        self,
        function: Callable[..., Any],
        cache: Cache,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        role: Role | None,
    ) -> Any:
        """Call `write` and `attend`, for the first layer of the group."""
        if role not in (Role.WRITES, Role.READS):
            raise UsageError(
                f"{function.__name__}: a model that is scored may write and attend only"
            )
        args, kwargs = given
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments["layer"] = _find_first(cache, bound.arguments["layer"])
        if role is Role.WRITES:
            return self._write(**bound.arguments)
        return function(*bound.args, **bound.kwargs)

    def _write(self, cache: Cache, **given: Any) -> Cache:
        found, rows = read_rows(cache, **given)
        storage = cache.storage[found.group]
        stored = {
            name: array.astype(storage.arrays[name].dtype)
            for name, array in rows.items()
        }
        gather = over_devices(storage.sharding, _gather, _Gathered, POOL)
        arrays = gather(_Gathered(rows=stored, slot_rows=self.slot_rows))
        return cache.with_group_storage(found.group, storage.with_arrays(arrays))


def _find_first(cache: Cache, layer: Integer | GroupLayer) -> GroupLayer:
    """Return the first layer of a layer's group."""
    if not isinstance(layer, GroupLayer):
        layer = locate_layer(cache, layer)
    return GroupLayer(layer.group, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Gathered:
    """The arrays of a pool that is gathered, and how devices divide them."""

    # What the slots hold, by the names of the group's arrays, [R, K, D].
    rows: dict[str, jax.Array] = dataclasses.field(metadata=divided(ROWS))
    slot_rows: jax.Array  # i32[N, T], the row in each slot


def _gather(operands: _Gathered) -> dict[str, jax.Array]:
    """Fill a pool of one layer with the rows that its slots hold, [1, N, K, T, D].

    Every slot is named, so nothing of what the pool held is kept: derivatives flow from
    the pool to the rows alone.
    """

    def gather(given: jax.Array) -> jax.Array:
        slots = jnp.take(given, operands.slot_rows, axis=0, mode="fill", fill_value=0)
        return jnp.moveaxis(slots, 2, 1)[None]

    return {name: gather(each) for name, each in operands.rows.items()}
