"""Queries of the newest tokens of each sequence, for scoring rules that need them.

A ring per sequence: the query of position p is at index p modulo W. The stored position
tells if it was observed. Absent queries are a value without arrays.

Symbols as in `jkv.state.metadata`; H query heads, W observed queries.
"""

import dataclasses
from typing import NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp

from jkv.operations import gather, scatter


class Observed(NamedTuple):
    """The newest queries of B sequences, newest last."""

    queries: jax.Array  # f32[B, W, H, D], zeros before the first one
    num: jax.Array  # i32[B], observed queries at the end, without a gap


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Unobserved:
    """Layers without observed queries."""

    width = 0  # static, W
    num_heads = None

    def _as_it_is(self, *_: object) -> Self:
        """Return self: there is nothing to change."""
        return self

    cleared = cut = inherited = _as_it_is


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ObservedQueries:
    """Rings of queries, one per layer and sequence."""

    queries: jax.Array  # [L, S, W, H, D]
    positions: jax.Array  # i32[S, W], position of each query, -1 for none

    @property
    def width(self) -> int:
        """Queries per sequence, W."""
        return self.positions.shape[-1]

    @property
    def num_heads(self) -> int:
        """Query heads, H."""
        return self.queries.shape[-2]

    def cleared(self, row: jax.Array) -> Self:
        """Forget the queries of rows, i32[B]; rows >= S are dropped."""
        return dataclasses.replace(self, positions=scatter(self.positions, row, -1))

    def cut(self, row: jax.Array, ends: jax.Array) -> Self:
        """Forget the queries at and after positions `ends` of rows, i32[B] each."""
        known = gather(self.positions, row)
        known = jnp.where(known < ends[:, None], known, -1)
        return dataclasses.replace(self, positions=scatter(self.positions, row, known))

    def inherited(self, row: jax.Array, source: jax.Array, ends: jax.Array) -> Self:
        """Copy the queries of `source` before `ends` to distinct rows, i32[B] each."""
        queries = self.queries.at[:, row].set(
            self.queries.at[:, source].get(mode="clip"), mode="drop"
        )
        positions = scatter(self.positions, row, gather(self.positions, source))
        copied = dataclasses.replace(self, queries=queries, positions=positions)
        return copied.cut(row, ends)

    def written(
        self,
        layer: jax.Array | int,
        row: jax.Array,  # i32[R], S for none
        position: jax.Array,  # i32[R], distinct within the ring of a row
        queries: jax.Array,  # [R, H, D]
    ) -> Self:
        """Store queries of one layer."""
        at = position % self.width
        stored = self.queries.at[layer, row, at].set(
            queries.astype(self.queries.dtype), mode="drop"
        )
        positions = scatter(self.positions, (row, at), position)
        return dataclasses.replace(self, queries=stored, positions=positions)

    def read(
        self,
        layer: jax.Array | int,
        rows: jax.Array,  # i32[B]
        ends: jax.Array,  # i32[B], position of the next token
    ) -> Observed:
        """Return the queries of one layer before the given positions."""
        steps = jnp.arange(-self.width, 0, dtype=jnp.int32)
        position = ends[:, None] + steps[None]
        at = position % self.width
        known = gather(self.positions, (rows[:, None], at)) == position
        known &= position >= 0
        known = jnp.cumprod(known[:, ::-1].astype(jnp.int32), axis=1)[:, ::-1]
        found = self.queries.at[layer, rows[:, None], at].get(mode="clip")
        found = jnp.where(known[..., None, None] > 0, found.astype(jnp.float32), 0)
        return Observed(found, jnp.sum(known, axis=1, dtype=jnp.int32))


Observing: TypeAlias = Unobserved | ObservedQueries
