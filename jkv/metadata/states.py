"""What the rows of sequences hold in groups with a state: pending tokens, and moves.

The metadata says how many tokens of each sequence are pending and which texts have
snapshots; `jkv.storage.state_copies` then does to the arrays what a call decided.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jkv.metadata.entries import for_each_entry
from jkv.sharding.loops import when
from jkv.state import Metadata, States

Carry = TypeVar("Carry")


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


class Cut(NamedTuple):
    """What B sequences that are cut back to a length go on from."""

    is_wrong: jax.Array  # bool[B], no state stands at that length or can be had there
    num_pending: jax.Array  # i32[B], tokens that are pending then
    place: jax.Array  # i32[B], the snapshot that is at that length, P for none


def states_of(metadata: Metadata) -> States:
    """Return what the cache notes of states; it has some."""
    assert metadata.states is not None, "a group with a state has its metadata"
    return metadata.states


def with_states(metadata: Metadata, **changes: object) -> Metadata:
    """Return the metadata with other values in fields of its `States`."""
    states = dataclasses.replace(states_of(metadata), **changes)  # type: ignore[arg-type]
    return dataclasses.replace(metadata, states=states)


def set_pending(metadata: Metadata, row: jax.Array, count: jax.Array | int) -> Metadata:
    """Note how many tokens of rows, i32[B], are pending; a row of S is dropped."""
    pending = states_of(metadata).num_pending
    if pending is None:
        return metadata
    pending = pending.at[row].set(jnp.asarray(count, jnp.int32), mode="drop")
    return with_states(metadata, num_pending=pending)


def record_texts(
    metadata: Metadata,
    row: jax.Array,
    position: jax.Array,
    tokens: jax.Array,
) -> Metadata:
    """Note tokens, i32[...], at positions of rows; a row of S is dropped."""
    texts = states_of(metadata).texts
    if texts is None:
        return metadata
    texts = texts.at[row, position].set(tokens, mode="drop")
    return with_states(metadata, texts=texts)


def copy_texts(metadata: Metadata, moves: StateMoves) -> Metadata:
    """Let the rows of moves have the texts of the rows that they come from."""
    texts = states_of(metadata).texts
    if texts is None or moves.source is None:
        return metadata
    is_copied = moves.source < metadata.max_sequences

    if moves.is_exchange:

        def exchange(texts: jax.Array, source: jax.Array) -> jax.Array:
            rows = texts.at[source].get(mode="clip")
            return texts.at[moves.target].set(rows, mode="drop")

        texts = when(jnp.any(is_copied), exchange, texts, moves.source)
    else:

        def copy(request: jax.Array, texts: jax.Array) -> jax.Array:
            assert moves.source is not None
            row = texts.at[moves.source[request]].get(mode="clip")
            return texts.at[moves.target[request]].set(row, mode="drop")

        texts = for_each_of(is_copied, copy, texts)
    return with_states(metadata, texts=texts)


def for_each_of(
    mask: jax.Array, trip: Callable[[jax.Array, Carry], Carry], carry: Carry
) -> Carry:
    """Call `trip(request, carry)` for each request of a mask, bool[B], in order.

    Args:
      mask: which requests; a call without any makes no trip.
      trip: takes the request's number, i32[1], and the carry.
      carry: what trips change.
    """
    return for_each_entry(
        mask.astype(jnp.int32),
        mask.shape[0],
        lambda carry, _entry, request, _rank, _valid: trip(request, carry),
        carry,
        width=1,
    )
