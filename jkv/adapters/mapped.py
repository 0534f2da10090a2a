"""Attention under `jax.vmap`: one call for all mapped rows or heads.

A model may map its attention over rows, over heads, or over the sequences of a batch,
one in a packed step. A cache is updated once for all of them: the rule of a
`custom_vmap` moves the mapped axes to the rows or to the heads, and the updated cache
is not mapped.

    R, H, K, D, Dv  as in `jkv.adapters.step`
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import get_opaque_trace_state

from jkv.state import Batch, Cache
from jkv.status import UsageError


class Rows(NamedTuple):
    """The arguments of a call of attention."""

    queries: jax.Array  # [..., H, D]
    keys: jax.Array | None  # [..., K, D]
    values: jax.Array | None  # [..., K, Dv]
    sinks: jax.Array | None  # f32[H]
    options: dict[str, Any]  # of `write` and `attend`, the same for all rows

    def pack(self, num_rows: int) -> Self:
        """Return the rows in the batch's order, [R, ...]."""
        packed = {}
        for name in ("queries", "keys", "values"):
            array = getattr(self, name)
            if array is None:
                continue
            if array.ndim < 3 or count_rows(array) != num_rows:
                raise UsageError(
                    f"{name} must be [{num_rows}, heads, head_dim], or with leading "
                    f"axes [1, {num_rows}] or [{num_rows}, 1], a row for each row of "
                    f"the batch, got {list(array.shape)}; under jax.vmap pass a row as "
                    f"[1, heads, head_dim] and a head as [{num_rows}, 1, head_dim]"
                )
            packed[name] = array.reshape(num_rows, *array.shape[-2:])
        return self._replace(**packed)


class Attended(NamedTuple):
    """The results of a call of attention."""

    heads: jax.Array  # [..., H, Dv]
    mark: jax.Array  # [R, H], an element of each head, for the next write
    cache: Cache


def count_rows(array: jax.Array) -> int:
    """Return the product of the leading axes of [..., heads, head_dim]."""
    return math.prod(array.shape[:-2])


def attend_mapped(
    compute: Callable[[Rows], Attended],  # with any leading axes of R rows
    rows: Rows,
    trace: Any,  # trace of the step
    cache: Cache,
    batch: Batch,
) -> Attended | None:
    """Return the results of attention under `jax.vmap`; None in another trace.

    Each `vmap` between this call and the step's own trace invokes a rule, the innermost
    first. The mapped axes are collected, and merged in the step's trace.
    """
    num_rows, is_done = batch.num_rows, [False]
    static = {n: x for n, x in rows.options.items() if not isinstance(x, jax.Array)}
    traced = {n: x for n, x in rows.options.items() if isinstance(x, jax.Array)}

    def call_with(axes: tuple[MappedAxis, ...], given: Rows) -> Attended:
        @custom_vmap
        def call(given: Rows) -> Attended:
            # Only types count: a call without a rule is in a foreign trace.
            heads = jnp.zeros(_shape_of(given, cache), given.queries.dtype)
            return Attended(heads, jnp.zeros((num_rows, 1), heads.dtype), cache)

        @call.def_vmap
        def rule(
            axis_size: int, is_batched: list[Rows], given: Rows
        ) -> tuple[Attended, Attended]:
            mapped = (MappedAxis.of(axis_size, is_batched[0]), *axes)
            if get_opaque_trace_state() == trace:
                is_done[0] = True
                merge = _Merge.of(mapped, given, num_rows, cache)
                merged = merge.merge_rows(given)
                found = compute(merged._replace(options=given.options | static))
                found = found._replace(heads=merge.split(found.heads))
            else:
                found = call_with(mapped, given)
            batched: Any = jax.tree.map(lambda _: False, found)
            return found, batched._replace(heads=True)

        found: Attended = call(given)
        return found

    found = call_with((), rows._replace(options=traced))
    return found if is_done[0] else None


def _shape_of(rows: Rows, cache: Cache) -> tuple[int, ...]:
    """Return the shape of the attended heads, [..., H, Dv]."""
    value_dim = rows.queries.shape[-1]
    sizes = {each.value_head_dim for each in cache.block_storage}
    if rows.values is not None:
        value_dim = rows.values.shape[-1]
    elif len(sizes) == 1:
        (value_dim,) = sizes
    return (*rows.queries.shape[:-1], value_dim)


class MappedAxis(NamedTuple):
    """An axis of `jax.vmap`, the first one of the arrays that it maps."""

    size: int
    maps_keys: bool
    maps_sinks: bool

    @classmethod
    def of(cls, size: int, is_batched: Rows) -> Self:
        """Return the axis; refuse to map other arguments, and keys alone."""
        if any(jax.tree.leaves(is_batched.options)):
            raise UsageError(
                "layer, scale and window must be equal for all rows and heads under "
                "jax.vmap, got mapped ones; call attend once for each value"
            )
        mapped = {bool(is_batched.keys), bool(is_batched.values)}
        has_both = is_batched.keys is not None and is_batched.values is not None
        if not is_batched.queries or (has_both and len(mapped) > 1):
            raise UsageError(
                "queries must be mapped under jax.vmap, and keys and values alike, got "
                "another mapping; map them over the same axis"
            )
        return cls(size, bool(is_batched.keys), bool(is_batched.sinks))


class _Merge(NamedTuple):
    """How mapped axes are merged with the rows and the heads, outermost first.

    Query heads of one kv head stay adjacent: heads are in the order of the axes that
    map keys, the heads of an element, the axes that do not.
    """

    axes: tuple[MappedAxis, ...]
    inner: tuple[int, ...]  # shape of an element's queries, [..., H, D]
    over_rows: tuple[int, ...]  # axes merged with the rows
    over_kv: tuple[int, ...]  # axes merged with the heads of queries and keys
    over_queries: tuple[int, ...]  # axes merged with the heads of queries alone

    @classmethod
    def of(
        cls, axes: tuple[MappedAxis, ...], rows: Rows, num_rows: int, cache: Cache
    ) -> Self:
        """Find the axes of rows: the outermost ones with R rows in all.

        Axes that do not map the keys are heads, and the others leave K kv heads.
        """
        inner, numbers = rows.queries.shape[len(axes) :], range(len(axes))
        size = math.prod(inner[:-2])
        choices = sorted(
            chosen
            for count in range(len(axes) + 1)
            for chosen in itertools.combinations(numbers, count)
            if size * math.prod(axes[i].size for i in chosen) == num_rows
        )
        if len(inner) < 3 or not choices:
            sizes = [axis.size for axis in axes]
            raise UsageError(
                f"queries must be [..., heads, head_dim] under jax.vmap over the "
                f"{num_rows} rows or over heads, got {list(inner)} mapped over "
                f"{sizes}; pass a row as [1, heads, head_dim] and a head as "
                f"[{num_rows}, 1, head_dim]"
            )
        known = {storage.num_kv_heads for storage in cache.block_storage}

        def fits(chosen: tuple[int, ...]) -> bool:
            if rows.keys is None:
                return True
            of_keys = [i for i in numbers if axes[i].maps_keys]
            rest = [axes[i].size for i in of_keys if i not in chosen]
            num_kv_heads = rows.keys.shape[-2] * math.prod(rest)
            return set(chosen) <= set(of_keys) and num_kv_heads in known

        over_rows = next(filter(fits, choices), choices[0])
        rest = [i for i in numbers if i not in over_rows]
        over_kv = tuple(i for i in rest if axes[i].maps_keys)
        over_queries = tuple(i for i in rest if not axes[i].maps_keys)
        return cls(axes, inner, over_rows, over_kv, over_queries)

    def merge_rows(self, rows: Rows) -> Rows:
        """Return queries, keys and values with leading axes of R rows, and sinks."""
        every = tuple(range(len(self.axes)))
        of_keys = tuple(i for i in every if self.axes[i].maps_keys)
        merged: dict[str, Any] = {"queries": self._merge(rows.queries, every)}
        for name in ("keys", "values"):
            if getattr(rows, name) is not None:
                merged[name] = self._merge(getattr(rows, name), of_keys)
        if rows.sinks is not None:
            merged["sinks"] = self._merge_sinks(rows.sinks)
        return rows._replace(**merged)

    def _merge(self, array: jax.Array, present: tuple[int, ...]) -> jax.Array:
        """Return [*rows, heads, D] of an array with the present axes first."""
        place = {axis: i for i, axis in enumerate(present)}
        rows, kv, alone = (
            [place[i] for i in each if i in place]
            for each in (self.over_rows, self.over_kv, self.over_queries)
        )
        *layout, heads, _ = range(len(present), array.ndim)
        order = [*rows, *layout, *kv, heads, *alone, array.ndim - 1]
        moved = jnp.transpose(array, order)
        num_leading = len(rows) + len(layout)
        return moved.reshape(*moved.shape[:num_leading], -1, moved.shape[-1])

    def _merge_sinks(self, sinks: jax.Array) -> jax.Array:
        """Return sinks of all heads, f32[H]."""
        for i in reversed(range(len(self.axes))):
            if self.axes[i].maps_sinks and i in self.over_rows:
                raise UsageError("sinks must be equal for all rows, got mapped ones")
        present = [i for i, axis in enumerate(self.axes) if axis.maps_sinks]
        sizes = {i: self.axes[i].size for i in (*self.over_kv, *self.over_queries)}
        shape = [sizes[i] if i in present else 1 for i in sizes]
        place = {axis: i for i, axis in enumerate(present)}
        order = [place[i] for i in sizes if i in place]
        sinks = jnp.transpose(sinks, [*order, sinks.ndim - 1])
        sinks = sinks.reshape(*shape, sinks.shape[-1])
        sinks = jnp.broadcast_to(sinks, (*sizes.values(), sinks.shape[-1]))
        sinks = jnp.moveaxis(sinks, -1, len(self.over_kv))
        return sinks.reshape(-1)

    def split(self, heads: jax.Array) -> jax.Array:
        """Return [*axes, ..., heads, Dv] of merged heads, the inverse of `_merge`."""
        *layout, num_heads, _ = self.inner
        rows, kv, alone = (
            [self.axes[i].size for i in each]
            for each in (self.over_rows, self.over_kv, self.over_queries)
        )
        shape = (*rows, *layout, *kv, num_heads, *alone, heads.shape[-1])
        split = heads.reshape(shape)
        first_kv = len(rows) + len(layout)
        first_alone = first_kv + len(kv) + 1
        place = dict(zip(self.over_rows, range(len(rows)), strict=True))
        place |= {axis: first_kv + i for i, axis in enumerate(self.over_kv)}
        place |= {axis: first_alone + i for i, axis in enumerate(self.over_queries)}
        of_layout = range(len(rows), first_kv)
        order = [place[i] for i in range(len(self.axes))]
        return jnp.transpose(
            split, [*order, *of_layout, first_alone - 1, split.ndim - 1]
        )
