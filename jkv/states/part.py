"""States of fixed size, as a part of a model (`jkv.metadata.part`).

All groups with a state are one part: they agree in what is pending. They lack nothing,
ever, as a sequence has its row in every array, and they have nothing to give back.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.indexing import gather
from jkv.metadata.part import Done, Lack, Lengths, Masks
from jkv.state import Cache, Metadata, StateStorage
from jkv.state.index import Found, FoundState
from jkv.states.copies import SnapshotCopies, StateMoves, copy_to_snapshots, move_states
from jkv.states.swapped import SwappedStates, fetch_states


class OfStates(NamedTuple):
    """The states that sequences have in all groups with one."""

    numbers: tuple[int, ...]  # static, of the groups

    @classmethod
    def of(cls, numbers: tuple[int, ...]) -> tuple["OfStates"]:
        """Return the part of groups: one for all."""
        return (cls(numbers),)

    def open(self, _metadata: Metadata, found: Found, *_: object) -> "_Opening":
        """Begin with the snapshots found, or with none."""
        return _Opening(found)

    def grow(self, *_: object) -> "_Nothing":
        """Do nothing: `write_state` stores what a step leaves."""
        return _Nothing()

    def share(
        self, metadata: Metadata, parents: jax.Array, length: Lengths
    ) -> "_Sharing":
        """Copy what parents have at lengths."""
        cut = _find_cut(metadata, parents, length.tokens)
        return _Sharing(parents, length.tokens, cut, False, (cut.is_wrong,))

    def cut(
        self, metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
    ) -> "_Cutting":
        """Take back tokens that are pending, or go on from a snapshot."""
        cut = _find_cut(metadata, seq_ids, lengths)
        return _Cutting(lengths, cut, (cut.is_wrong,))

    def enter(self, *_: object) -> "_Nothing":
        """Do nothing: what is pending is noted of the sequences."""
        return _Nothing()

    def exchange(
        self, metadata: Metadata, _: object, parents: jax.Array, length: Lengths
    ) -> "_Sharing":
        """Copy what parents have; all rows are read before one is written."""
        return self.share(metadata, parents, length)._replace(is_exchange=True)

    def close(self, metadata: Metadata, *_: object) -> Metadata:
        """Do nothing: whatever an empty sequence's row holds, it begins anew."""
        return metadata

    def follow(
        self, storage: StateStorage, moves: StateMoves | SnapshotCopies
    ) -> StateStorage:
        """Move states between rows, or between rows and snapshots."""
        if isinstance(moves, SnapshotCopies):
            return copy_to_snapshots(storage, moves)
        return move_states(storage, moves)

    def keep(self, rows: jax.Array, places: jax.Array) -> SnapshotCopies:
        """Copy the states of rows to places of snapshots, i32[B] each."""
        return SnapshotCopies(rows, places)

    def leave(self, *_: object) -> tuple[()]:
        """Return nothing: a sequence's states are in its row."""
        return ()

    def num_free(self, _: object) -> tuple[()]:
        """Return nothing: there is no pool."""
        return ()

    def fetch(
        self, cache: Cache, seq_ids: np.ndarray, *_: object
    ) -> dict[int, SwappedStates]:
        """Copy the states of rows to the host."""
        return {i: fetch_states(cache.storage[i], seq_ids) for i in self.numbers}


class _Cut(NamedTuple):
    """What B sequences that are cut back to a length go on from."""

    is_wrong: jax.Array  # bool[B], no state stands at that length or can be had there
    num_pending: jax.Array  # i32[B], tokens that are pending then
    snapshot: FoundState | None  # what is at that length; None without snapshots


def _find_cut(metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array) -> _Cut:
    """Return what sequences cut back to lengths, i32[B] each, go on from.

    The length may be the present one, 0, any from the base on, or a snapshot's.
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
    is_there = found.place < found.none
    pending = jnp.where(is_there, found.num_pending, pending)
    return _Cut(~(stands | is_there), pending, found)


class _Opening(NamedTuple):
    found: Found
    lacks: tuple[Lack, ...] = ()

    def pin(self, metadata: Metadata, _row: jax.Array) -> Metadata:
        return metadata

    def apply(self, metadata: Metadata, done: Done) -> tuple[Metadata, StateMoves]:
        row, state = done.rows(metadata), self.found.state
        if state is None:
            moves = StateMoves(row, jnp.zeros_like(row))
            return metadata.with_pending(row, 0), moves
        state = state.only(done.served)
        metadata = metadata.with_pending(row, state.num_pending)
        metadata = metadata.index.use(metadata, state)
        base = self.found.num_tokens(metadata.block_size) - state.num_pending
        return metadata, StateMoves(row, base, place=state.place)


class _Nothing(NamedTuple):
    lacks: tuple[Lack, ...] = ()

    def apply(self, metadata: Metadata, *_: object) -> tuple[Metadata, None]:
        return metadata, None


class _Sharing(NamedTuple):
    """Rows that go on from the states that their parents have."""

    parents: jax.Array  # i32[B]
    lengths: jax.Array  # i32[B], tokens that each row takes over
    found: _Cut  # what the parents have there
    is_exchange: bool  # static: whether a parent may be a row of another request
    wrongs: Masks
    lacks: tuple[Lack, ...] = ()

    def judge(self, _eligible: jax.Array) -> "_Sharing":
        return self

    def release(self, metadata: Metadata, _served: jax.Array) -> Metadata:
        return metadata

    def apply(self, metadata: Metadata, done: Done) -> tuple[Metadata, StateMoves]:
        found, is_taken = self.found, done.served & (self.lengths > 0)
        source = jnp.where(is_taken, self.parents, metadata.max_sequences)
        place = None if found.snapshot is None else found.snapshot.only(is_taken).place
        base = jnp.where(is_taken, self.lengths - found.num_pending, 0)
        row = done.rows(metadata)
        moves = StateMoves(row, base, source, place, self.is_exchange)
        return metadata.with_pending(row, found.num_pending), moves


class _Cutting(NamedTuple):
    """Rows that go back to an earlier state."""

    lengths: jax.Array  # i32[B]
    found: _Cut  # what there is
    wrongs: Masks
    lacks: tuple[Lack, ...] = ()

    def judge(self, eligible: jax.Array) -> "_Cutting":
        return self._replace(lengths=jnp.where(eligible, self.lengths, 0))

    def apply(self, metadata: Metadata, done: Done) -> tuple[Metadata, StateMoves]:
        lengths, found, row = self.lengths, self.found, done.rows(metadata)
        metadata = metadata.with_pending(row, found.num_pending)
        # Where the state stands before the cut already, tokens are pending no more.
        changes, place = lengths == 0, None
        if found.snapshot is not None:
            snapshot = found.snapshot.only(done.served)
            metadata = metadata.index.use(metadata, snapshot)
            changes |= snapshot.place < snapshot.none
            place = snapshot.place
        target = jnp.where(changes, row, metadata.max_sequences)
        base = jnp.where(lengths == 0, 0, lengths - found.num_pending)
        return metadata, StateMoves(target, base, place=place)
