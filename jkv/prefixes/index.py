"""The prefix index's interface for verbs; methods call functions of this package."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jkv.prefixes import (
    commitment,
    prefix_index,
    prompt_search,
    rebuilding,
    sequences,
    snapshots,
)
from jkv.prefixes.arrays import IndexArrays
from jkv.state import Batch, Metadata
from jkv.state.index import Found, FoundState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefixIndex(IndexArrays):
    """The prefix index: full blocks by the tokens up to their end."""

    is_there = True

    def find(
        self,
        metadata: Metadata,
        tokens: jax.Array | None,
        salts: jax.Array,
        recomputes_last: bool = False,
    ) -> Found:
        return prompt_search.find(metadata, tokens, salts, recomputes_last)

    def find_state(
        self, metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
    ) -> FoundState | None:
        return snapshots.find_at(metadata, seq_ids, lengths)

    def find_divergence(
        self, metadata: Metadata, tokens: jax.Array, salts: jax.Array
    ) -> jax.Array | None:
        return prompt_search.find_divergence(metadata, tokens, salts)

    def find_divergence_after(
        self,
        metadata: Metadata,
        seq_ids: jax.Array,
        lengths: jax.Array,
        tokens: jax.Array,
    ) -> jax.Array | None:
        return prompt_search.find_divergence_after(metadata, seq_ids, lengths, tokens)

    def tokens_of(self, metadata: Metadata, row: jax.Array) -> jax.Array:
        return sequences.tokens_of(metadata, row)

    def epochs_of(self, seq_ids: jax.Array) -> jax.Array:
        return self.read(seq_ids).epoch

    def leave(self, seq_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = self.read(seq_ids)
        return rows.committed, rows.salt

    def knows(self, metadata: Metadata, number: int, block: jax.Array) -> jax.Array:
        return prefix_index.is_known(metadata, number, block)

    def has_parents(self, metadata: Metadata, number: int) -> bool:
        return number == metadata.leader and self.wide_hashes is None

    def begin(
        self,
        metadata: Metadata,
        row: jax.Array,
        salts: jax.Array,
        num_cached: jax.Array,
        tokens: jax.Array | None,
    ) -> Metadata:
        return sequences.begin(metadata, row, salts, num_cached, tokens)

    def enter(
        self, metadata: Metadata, row: jax.Array, salts: jax.Array, known: jax.Array
    ) -> Metadata:
        return sequences.enter(metadata, row, salts, known)

    def record(
        self, metadata: Metadata, row: jax.Array, position: jax.Array, tokens: jax.Array
    ) -> Metadata:
        return sequences.record_tokens(metadata, row, position, tokens)

    def inherit(
        self,
        metadata: Metadata,
        row: jax.Array,
        parents: jax.Array,
        lengths: jax.Array,
        is_exchange: bool = False,
    ) -> Metadata:
        return sequences.inherit(metadata, row, parents, lengths, is_exchange)

    def cut(self, metadata: Metadata, row: jax.Array, lengths: jax.Array) -> Metadata:
        return sequences.cap_committed(metadata, row, lengths)

    def use(self, metadata: Metadata, found: FoundState | None) -> Metadata:
        return snapshots.mark_used(metadata, found)

    def forget(
        self, metadata: Metadata, number: int, block: jax.Array
    ) -> tuple[Metadata, jax.Array]:
        return prefix_index.forget_taken(metadata, number, block)

    def forget_rewritten(
        self, metadata: Metadata, number: int, block: jax.Array
    ) -> Metadata:
        return prefix_index.forget_rewritten(metadata, number, block)

    def commit(
        self, metadata: Metadata, batch: Batch
    ) -> tuple[Metadata, tuple[Any, ...]]:
        return commitment.commit_step(metadata, batch)

    def rename(
        self,
        metadata: Metadata,
        number: int,
        renamed: Callable[[jax.Array], jax.Array],
        moved: Callable[[jax.Array, int], jax.Array],
    ) -> Metadata:
        return rebuilding.rename_blocks(metadata, number, renamed, moved)

    def reenter(self, metadata: Metadata) -> Metadata:
        return rebuilding.reenter(metadata)
