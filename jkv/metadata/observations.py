"""Observed queries, as a part of a cache with `observed_queries` (`jkv.metadata.part`).

A child starts with its parent's queries, and a closed row forgets its own. After a
truncation the stored positions tell which queries remain.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata.part import Demand, Lengths, Masks, Served
from jkv.metadata.per_sequence import Nothing, PerSequence
from jkv.state import Metadata


class Observations(PerSequence):
    """The observed queries of all sequences."""

    __slots__ = ()

    def share(self, _: Metadata, parents: jax.Array, _length: Lengths) -> "_Copying":
        """Start rows with the queries of their parents."""
        return _Copying(parents)

    def exchange(
        self, _: Metadata, _seq_ids: jax.Array, parents: jax.Array, _length: Lengths
    ) -> "_Copying":
        """Restart sequences with the queries of their parents."""
        return _Copying(parents)

    def cut(self, *_: object) -> Nothing:
        """Plan nothing: the stored positions tell which queries remain."""
        return Nothing()

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
            observed = metadata.groups[number].observed.inherited(row, source)
            metadata = metadata.changed(number, observed=observed)
        return metadata, None
