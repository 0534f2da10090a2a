"""What the rows of sequences hold in groups with a state: pending tokens, and moves.

The metadata says how many tokens of each sequence are pending;
`jkv.states.copies` then does to the arrays what a call decided.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.state import Metadata
from jkv.state.index import FoundState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StateMoves:
    """What one call does to the states of rows, for each of B requests.

    No row is a target twice. Sources are as they were before the call.
    """

    target: jax.Array  # i32[B], the row, S for none
    base: jax.Array  # i32[B], at how many tokens its state stands then; 0: at none
    source: jax.Array | None = None  # i32[B], the row it is copied from, S for none
    place: jax.Array | None = None  # i32[B], or the snapshot's place, P for none
    # Static: whether a source may be the target of another request.
    is_exchange: bool = dataclasses.field(default=False, metadata={"static": True})


class SnapshotCopies(NamedTuple):
    """Rows whose states one call copies to places of snapshots."""

    rows: jax.Array  # i32[B]
    places: jax.Array  # i32[B], P for none


class Cut(NamedTuple):
    """What B sequences that are cut back to a length go on from."""

    is_wrong: jax.Array  # bool[B], no state stands at that length or can be had there
    num_pending: jax.Array  # i32[B], tokens that are pending then
    snapshot: FoundState | None  # what is at that length; None without snapshots


def find_cut(metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array) -> Cut:
    """Return what sequences cut back to lengths, i32[B] each, go on from.

    The length may be the present one, 0, any from the base on, or a snapshot's.
    """
    length = metadata.context_lengths.at[seq_ids].get(mode="clip")
    base = length - metadata.sequences.pending_of(seq_ids)
    stands = (lengths == 0) | ((lengths >= base) & (lengths <= length))
    pending = jnp.where(lengths == 0, 0, lengths - base)
    looked_for = jnp.where(stands | (lengths > length), 0, lengths)
    looked_for = jnp.maximum(looked_for, 0)
    found = metadata.index.find_state(metadata, seq_ids, looked_for)
    if found is None:
        return Cut(~stands, pending, None)
    is_there = found.place < found.none
    pending = jnp.where(is_there, found.num_pending, pending)
    return Cut(~(stands | is_there), pending, found)
