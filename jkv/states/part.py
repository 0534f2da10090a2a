"""Recurrent states, as a part of a model (`jkv.metadata.part`).

All groups with a state form one part, as they share the pending tokens. It has no pool:
a sequence has its row in every array.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata.part import Demand, Lengths, Masks, Selection, Served
from jkv.operations import gather
from jkv.state import Cache, Metadata, StateStorage
from jkv.state.index import Found, FoundState
from jkv.states.copies import SnapshotCopies, StateMoves, copy_to_snapshots, move_states
from jkv.states.swapped import SwappedStates, fetch_states


class OfStates(NamedTuple):
    """States of the sequences in all groups with a state."""

    numbers: tuple[int, ...]  # static, the groups' indices

    @classmethod
    def of(cls, numbers: tuple[int, ...]) -> tuple["OfStates"]:
        """Return one part for all groups."""
        return (cls(numbers),)

    def open(self, _metadata: Metadata, found: Found, *_: object) -> "_Opening":
        """Open sequences from snapshots, or with empty states."""
        return _Opening(found)

    def grow(self, *_: object) -> "_Nothing":
        """Plan nothing: `write_state` stores the states of a step."""
        return _Nothing()

    def share(
        self, metadata: Metadata, parents: jax.Array, length: Lengths
    ) -> "_Sharing":
        """Copy the parents' states at lengths."""
        cut = _find_cut(metadata, parents, length.tokens)
        return _Sharing(parents, length.positions, cut, False, (cut.is_wrong,))

    def cut(
        self, metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
    ) -> "_Cutting":
        """Roll back pending tokens, or restore a snapshot."""
        cut = _find_cut(metadata, seq_ids, lengths)
        return _Cutting(lengths, cut, (cut.is_wrong,))

    def prune(self, metadata: Metadata, selection: Selection) -> "_Staying":
        """Leave the states; the pending tokens are among the kept ones.

        With rotation the state needs a token before them: a base of 0 is no state.
        """
        fewest = metadata.sequences.pending_of(selection.seq_ids)
        fewest += int(selection.rotates)
        return _Staying((selection.num_kept < fewest,))

    def enter(self, *_: object) -> "_Nothing":
        """Plan nothing: pending counts belong to the sequences."""
        return _Nothing()

    def exchange(
        self, metadata: Metadata, _: object, parents: jax.Array, length: Lengths
    ) -> "_Sharing":
        """Copy the parents' states; all rows are read before one is written."""
        return self.share(metadata, parents, length)._replace(is_exchange=True)

    def close(self, metadata: Metadata, *_: object) -> Metadata:
        """Return the metadata unchanged: rows are cleared when reopened."""
        return metadata

    def follow(
        self, storage: StateStorage, moves: StateMoves | SnapshotCopies
    ) -> StateStorage:
        """Move states between rows, or between rows and snapshots."""
        if isinstance(moves, SnapshotCopies):
            return copy_to_snapshots(storage, moves)
        return move_states(storage, moves)

    def keep(self, rows: jax.Array, snapshot_ids: jax.Array) -> SnapshotCopies:
        """Copy the states of rows to snapshots, i32[B] each."""
        return SnapshotCopies(rows, snapshot_ids)

    def leave(self, *_: object) -> tuple[()]:
        """Return (): a sequence's states are in its row."""
        return ()

    def num_free(self, _: object) -> tuple[()]:
        """Return (): there is no pool."""
        return ()

    def fetch(
        self, cache: Cache, seq_ids: np.ndarray, *_: object
    ) -> dict[int, SwappedStates]:
        """Copy the states of rows to the host."""
        return {i: fetch_states(cache.storage[i], seq_ids) for i in self.numbers}


class _Cut(NamedTuple):
    """Starting points of B truncated sequences."""

    is_wrong: jax.Array  # bool[B], True if there is no state for that length
    num_pending: jax.Array  # i32[B], pending tokens at that length
    snapshot: FoundState | None  # snapshots of that length; None without snapshots


def _find_cut(metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array) -> _Cut:
    """Return the starting points of sequences truncated to lengths, i32[B] each.

    Valid lengths are the current one, 0, any from the base on, and a snapshot's.
    """
    length = gather(metadata.context_lengths, seq_ids)
    base = length - metadata.sequences.pending_of(seq_ids)
    stands = (lengths == 0) | ((lengths >= base) & (lengths <= length))
    pending = jnp.where(lengths == 0, 0, lengths - base)
    looked_for = jnp.where(stands | (lengths > length), 0, lengths)
    looked_for = jnp.maximum(looked_for, 0)
    found = metadata.index.find_state(metadata, seq_ids, looked_for)
    if found is None:
        return _Cut(~stands, pending, None)
    is_there = found.snapshot_id < found.none
    pending = jnp.where(is_there, found.num_pending, pending)
    return _Cut(~(stands | is_there), pending, found)


class _Opening(NamedTuple):
    found: Found
    lacks: tuple[Demand, ...] = ()

    def pin(self, metadata: Metadata, _row: jax.Array) -> Metadata:
        return metadata

    def apply(self, metadata: Metadata, done: Served) -> tuple[Metadata, StateMoves]:
        row, state = done.rows(metadata), self.found.state
        if state is None:
            moves = StateMoves(row, jnp.zeros_like(row))
            return metadata.with_pending(row, 0), moves
        state = state.only(done.served)
        metadata = metadata.with_pending(row, state.num_pending)
        metadata = metadata.index.use(metadata, state)
        base = self.found.num_tokens(metadata.block_size) - state.num_pending
        return metadata, StateMoves(row, base, snapshot_id=state.snapshot_id)


class _Nothing(NamedTuple):
    lacks: tuple[Demand, ...] = ()

    def apply(self, metadata: Metadata, *_: object) -> tuple[Metadata, None]:
        return metadata, None


class _Staying(NamedTuple):
    wrongs: Masks
    lacks: tuple[Demand, ...] = ()

    def judge(self, _eligible: jax.Array) -> "_Staying":
        return self

    def apply(self, metadata: Metadata, *_: object) -> tuple[Metadata, None]:
        return metadata, None


class _Sharing(NamedTuple):
    """Rows that start from their parents' states."""

    parents: jax.Array  # i32[B]
    positions: jax.Array  # i32[B], tokens before the child's next one, dropped or not
    found: _Cut  # states of the parents at these lengths
    is_exchange: bool  # static: True if a parent may be a row of another request
    wrongs: Masks
    lacks: tuple[Demand, ...] = ()

    def judge(self, _eligible: jax.Array) -> "_Sharing":
        return self

    def release(self, metadata: Metadata, _served: jax.Array) -> Metadata:
        return metadata

    def apply(self, metadata: Metadata, done: Served) -> tuple[Metadata, StateMoves]:
        found, is_taken = self.found, done.served & (self.positions > 0)
        source = jnp.where(is_taken, self.parents, metadata.max_sequences)
        snapshot_id = (
            None
            if found.snapshot is None
            else found.snapshot.only(is_taken).snapshot_id
        )
        base = jnp.where(is_taken, self.positions - found.num_pending, 0)
        row = done.rows(metadata)
        moves = StateMoves(row, base, source, snapshot_id, self.is_exchange)
        return metadata.with_pending(row, found.num_pending), moves


class _Cutting(NamedTuple):
    """Rows that return to an earlier state."""

    lengths: jax.Array  # i32[B]
    found: _Cut  # available states
    wrongs: Masks
    lacks: tuple[Demand, ...] = ()

    def judge(self, eligible: jax.Array) -> "_Cutting":
        return self._replace(lengths=jnp.where(eligible, self.lengths, 0))

    def apply(self, metadata: Metadata, done: Served) -> tuple[Metadata, StateMoves]:
        lengths, found, row = self.lengths, self.found, done.rows(metadata)
        metadata = metadata.with_pending(row, found.num_pending)
        # If the state already precedes the cut, the tokens are just no longer pending.
        changes, snapshot_id = lengths == 0, None
        if found.snapshot is not None:
            snapshot = found.snapshot.only(done.served)
            metadata = metadata.index.use(metadata, snapshot)
            changes |= snapshot.snapshot_id < snapshot.none
            snapshot_id = snapshot.snapshot_id
        target = jnp.where(changes, row, metadata.max_sequences)
        base = jnp.where(lengths == 0, 0, lengths - found.num_pending)
        return metadata, StateMoves(target, base, snapshot_id=snapshot_id)
