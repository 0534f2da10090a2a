"""What the prefix index notes of each sequence: its domain, and how far it is visible.

A sequence has an *epoch*, the clock when it was opened, cut back or reordered last. A
step that was planned in another epoch makes nothing visible.
"""

import jax
import jax.numpy as jnp

from jkv.metadata.prefixes.prefix_index import if_indexed, index_of, with_index
from jkv.state import Metadata


@if_indexed
def note_opened(
    metadata: Metadata, row: jax.Array, salts: jax.Array, committed: jax.Array
) -> Metadata:
    """Note the domain of opened rows, i32[B], and the tokens found for them."""
    index, stamp = index_of(metadata), metadata.now + jnp.uint32(1)
    return with_index(
        metadata,
        committed=index.committed.at[row].set(committed, mode="drop"),
        sequence_salts=index.sequence_salts.at[row].set(salts, mode="drop"),
        epochs=index.epochs.at[row].set(stamp, mode="drop"),
    )


@if_indexed
def inherit(
    metadata: Metadata,
    before: Metadata,
    row: jax.Array,
    parents: jax.Array,
    lengths: jax.Array,
) -> Metadata:
    """Let rows, i32[B], continue from the first tokens of what the parents' had been.

    Args:
      metadata: the state.
      before: the state to look the parents up in.
      row: i32[B], of the tables; one of S or above is dropped.
      parents: i32[B].
      lengths: i32[B], tokens that each row takes over.
    """
    index = index_of(before)
    committed = index.committed.at[parents].get(mode="clip")
    return note_opened(
        metadata,
        row,
        index.sequence_salts.at[parents].get(mode="clip"),
        jnp.minimum(committed, lengths),
    )


@if_indexed
def cut_back(metadata: Metadata, row: jax.Array, lengths: jax.Array) -> Metadata:
    """Note that rows, i32[B], hold no more than these tokens, i32[B], any longer."""
    index = index_of(metadata)
    committed = jnp.minimum(index.committed.at[row].get(mode="clip"), lengths)
    # An empty sequence holds nothing that could be out of date.
    committed = jnp.where(lengths == 0, 0, committed)
    salts = index.sequence_salts.at[row].get(mode="clip")
    return note_opened(metadata, row, salts, committed)


def epochs(metadata: Metadata, seq_ids: jax.Array) -> jax.Array | None:
    """Return when each sequence was opened or last cut back, u32[B], with an index."""
    if metadata.index is None:
        return None
    return metadata.index.epochs.at[seq_ids].get(mode="clip")
