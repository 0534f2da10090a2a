"""Observed queries, as a part of a cache with `observed_queries` (`jkv.metadata.part`).

A child starts with its parent's queries, and a closed row forgets its own. Removed
tokens lose their queries, since later tokens at their positions may not be observed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata.part import Check, Demand, Lengths, Masks, Selection, Served
from jkv.metadata.per_sequence import Nothing, PerSequence
from jkv.state import Metadata


class Observations(PerSequence):
    """The observed queries of all sequences."""

    __slots__ = ()

    def share(self, _: Metadata, parents: jax.Array, length: Lengths) -> "_Copying":
        """Start rows with the queries of their parents."""
        return _Copying(parents, length)

    def exchange(
        self, _: Metadata, _seq_ids: jax.Array, parents: jax.Array, length: Lengths
    ) -> "_Copying":
        """Restart sequences with the queries of their parents."""
        return _Copying(parents, length)

    def cut(
        self, metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
    ) -> "_Cutting":
        """Forget the queries of truncated tokens."""
        ends = metadata.sequences.pruned.positions_of(seq_ids, lengths)
        # A sequence of length 0 starts anew at position 0.
        return _Cutting(jnp.where(lengths == 0, 0, ends))

    def prune(self, _metadata: Metadata, selection: Selection) -> Check:
        """Forget all queries if tokens move to other positions."""
        if not selection.rotates:
            return Nothing()
        return _Cutting(jnp.zeros_like(selection.num_kept))

    def close(
        self, metadata: Metadata, seq_ids: jax.Array, closable: jax.Array
    ) -> Metadata:
        """Forget the queries of closed rows."""
        row = jnp.where(closable, seq_ids, metadata.max_sequences)
        for number in metadata.block_numbers:
            observed = metadata.groups[number].observed.cleared(row)
            metadata = metadata.changed(number, observed=observed)
        return metadata


class _Copying(NamedTuple):
    """Rows that start with the queries of other rows."""

    parents: jax.Array  # i32[B]
    length: Lengths
    wrongs: Masks = ()
    lacks: tuple[Demand, ...] = ()

    def judge(self, *_: object) -> "_Copying":
        return self

    def release(self, metadata: Metadata, _served: jax.Array) -> Metadata:
        return metadata

    def apply(self, metadata: Metadata, done: Served) -> tuple[Metadata, None]:
        row = done.rows(metadata)
        source = jnp.clip(self.parents, 0, metadata.max_sequences - 1)
        for number in metadata.block_numbers:
            observed = metadata.groups[number].observed
            observed = observed.inherited(row, source, self.length.positions)
            metadata = metadata.changed(number, observed=observed)
        return metadata, None


class _Cutting(NamedTuple):
    """Rows that forget the queries at and after some positions."""

    ends: jax.Array  # i32[B]
    wrongs: Masks = ()
    lacks: tuple[Demand, ...] = ()

    def judge(self, *_: object) -> "_Cutting":
        return self

    def apply(self, metadata: Metadata, done: Served) -> tuple[Metadata, None]:
        return forget_queries(metadata, done.rows(metadata), self.ends), None


def forget_queries(metadata: Metadata, row: jax.Array, ends: jax.Array) -> Metadata:
    """Forget queries at and after `ends` of distinct rows, i32[B]; S for none."""
    for number in metadata.block_numbers:
        observed = metadata.groups[number].observed.cut(row, ends)
        metadata = metadata.changed(number, observed=observed)
    return metadata
