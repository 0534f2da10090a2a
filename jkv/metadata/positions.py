"""Positions apart from slots, as a part of a cache with pruning (`jkv.metadata.part`).

Each plan only updates the dropped tokens of sequences. A child has its parent's, and a
sequence that is cut to length 0 starts anew.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata.part import Demand, Lengths, Masks, Served
from jkv.metadata.per_sequence import PerSequence
from jkv.operations import gather
from jkv.state import Metadata, Pruned


class Positions(PerSequence):
    """The dropped tokens of all sequences."""

    __slots__ = ()

    def share(
        self, metadata: Metadata, parents: jax.Array, length: Lengths
    ) -> "_Inheriting":
        """Start rows at their parents' positions, or at 0 without a token of them."""
        return _Inheriting(
            parents, length, (_cuts_kept(metadata, parents, length.tokens),)
        )

    def exchange(
        self, metadata: Metadata, _: object, parents: jax.Array, length: Lengths
    ) -> "_Inheriting":
        return self.share(metadata, parents, length)

    def cut(
        self, metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
    ) -> "_Cutting":
        """Reset sequences that are cut to length 0."""
        return _Cutting(lengths, (_cuts_kept(metadata, seq_ids, lengths),))

    def close(
        self, metadata: Metadata, seq_ids: jax.Array, closable: jax.Array
    ) -> Metadata:
        """Reset closed rows."""
        return _write(metadata, jnp.where(closable, seq_ids, metadata.max_sequences))


def _cuts_kept(metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return True for lengths among the kept tokens, bool[B]; 0 is allowed."""
    num_left = gather(_pruned_of(metadata).num_left, seq_ids)
    return (lengths != 0) & (lengths < num_left)


def _pruned_of(metadata: Metadata) -> Pruned:
    pruned = metadata.sequences.pruned
    assert isinstance(pruned, Pruned), "this part is of caches with pruning"
    return pruned


def _write(
    metadata: Metadata,
    row: jax.Array,
    num_dropped: jax.Array | int = 0,
    num_left: jax.Array | int = 0,
) -> Metadata:
    """Replace the numbers of distinct rows, i32[B]; rows >= S are dropped."""
    pruned = _pruned_of(metadata).with_rows(row, num_dropped, num_left)
    return metadata.with_pruned(pruned)


class _Inheriting(NamedTuple):
    """Rows that start from their parents' tokens."""

    parents: jax.Array  # i32[B]
    length: Lengths
    wrongs: Masks
    lacks: tuple[Demand, ...] = ()

    def judge(self, *_: object) -> "_Inheriting":
        return self

    def release(self, metadata: Metadata, _served: jax.Array) -> Metadata:
        return metadata

    def apply(self, metadata: Metadata, done: Served) -> tuple[Metadata, None]:
        num_dropped = self.length.positions - self.length.tokens
        num_left = gather(_pruned_of(metadata).num_left, self.parents)
        num_left = jnp.where(self.length.tokens == 0, 0, num_left)
        row = done.rows(metadata)
        return _write(metadata, row, num_dropped, num_left), None


class _Cutting(NamedTuple):
    """Rows that lose tokens at their end."""

    lengths: jax.Array  # i32[B]
    wrongs: Masks
    lacks: tuple[Demand, ...] = ()

    def judge(self, eligible: jax.Array) -> "_Cutting":
        return self._replace(lengths=jnp.where(eligible, self.lengths, 0))

    def apply(self, metadata: Metadata, done: Served) -> tuple[Metadata, None]:
        row = done.rows(metadata)
        row = jnp.where(self.lengths == 0, row, metadata.max_sequences)
        return _write(metadata, row), None
