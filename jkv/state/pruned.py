"""Dropped tokens of sequences: positions apart from slots.

A *slot* is a token's index among the cached tokens of its sequence, and a *position*
its index in the text. `prune` drops tokens and packs the others: the next token then
has a slot below its position. The difference is the same for all later tokens, so one
number per sequence suffices, and verbs that change lengths need not update it.

`Unpruned` is a cache whose sequences keep all their tokens: it has no arrays and
returns its arguments, so it adds no operations to a program.

Symbols in shape comments as in `jkv.state.metadata`.
"""

import dataclasses
from typing import Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.indexing import gather, scatter


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Unpruned:
    """Sequences with all their tokens: a token's position is its slot."""

    is_there = False  # static: True if sequences can be pruned

    def positions_of(self, _seq_ids: jax.Array, slots: jax.Array) -> jax.Array:
        """Return the positions of tokens after the kept ones, i32[...]: their slots."""
        return slots

    def is_pruned(self, seq_ids: jax.Array) -> np.ndarray:
        """Return False: no sequence was pruned."""
        return np.zeros(seq_ids.shape, bool)

    def unpruned(self, rows: jax.Array) -> jax.Array:
        """Return the rows of sequences that were not pruned, i32[...]: all."""
        return rows

    def leave(self, _seq_ids: jax.Array) -> None:
        """Return None: there are no numbers to swap out."""

    def cuts_through(self, *_: object) -> tuple[()]:
        """Return (): sequences can be truncated to any length."""
        return ()

    def _as_it_is(self, *_: object) -> Self:
        """Return self: nothing is ever dropped."""
        return self

    with_rows = without_rows = inherited = _as_it_is


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pruned:
    """Sequences that `prune` may have shortened."""

    is_there = True

    # i32[S], dropped tokens: positions after the last prune minus slots.
    num_dropped: jax.Array
    # i32[S], tokens kept by the last prune, which a truncation may not cut.
    num_left: jax.Array

    def positions_of(self, seq_ids: jax.Array, slots: jax.Array) -> jax.Array:
        """Return the positions of tokens after the kept ones, i32[...]."""
        return slots + gather(self.num_dropped, seq_ids)

    def is_pruned(self, seq_ids: jax.Array) -> jax.Array:
        """Return True for sequences that were pruned, bool[...]."""
        dropped, left = self.leave(seq_ids)
        return (dropped > 0) | (left > 0)

    def unpruned(self, rows: jax.Array) -> jax.Array:
        """Return the rows of sequences that were not pruned, i32[...], else S."""
        return jnp.where(self.is_pruned(rows), self.num_left.shape[0], rows)

    def leave(self, seq_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the numbers of swapped-out sequences, i32[B] each."""
        return gather(self.num_dropped, seq_ids), gather(self.num_left, seq_ids)

    def cuts_through(
        self, seq_ids: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Return one mask of lengths among the kept tokens, bool[B]; 0 is allowed."""
        return ((lengths != 0) & (lengths < gather(self.num_left, seq_ids)),)

    def with_rows(
        self, row: jax.Array, num_dropped: jax.Array | int, num_left: jax.Array | int
    ) -> Self:
        """Replace distinct rows, i32[B]; rows >= S are dropped."""
        return dataclasses.replace(
            self,
            num_dropped=scatter(self.num_dropped, row, num_dropped),
            num_left=scatter(self.num_left, row, num_left),
        )

    def without_rows(self, row: jax.Array, lengths: jax.Array | None = None) -> Self:
        """Reset distinct rows, i32[B], or the ones cut to length 0 of i32[B]."""
        if lengths is not None:
            row = jnp.where(lengths == 0, row, self.num_left.shape[0])
        return self.with_rows(row, 0, 0)

    def inherited(
        self, row: jax.Array, parents: jax.Array, lengths: jax.Array | None = None
    ) -> Self:
        """Copy the numbers of parents to rows, i32[B], or zeros where cut to 0."""
        dropped, left = self.leave(parents)
        if lengths is not None:
            dropped, left = (jnp.where(lengths == 0, 0, n) for n in (dropped, left))
        return self.with_rows(row, dropped, left)


Pruning: TypeAlias = Unpruned | Pruned
