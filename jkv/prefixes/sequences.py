"""What the prefix index notes of each sequence: its domain, and how far it is visible.

A sequence has an *epoch*, the clock when it was opened, cut back or reordered last. A
step that was planned in another epoch makes nothing visible.
"""

import jax
import jax.numpy as jnp

from jkv.metadata import counters
from jkv.prefixes.prefix_index import index_of, with_index
from jkv.prefixes.texts import copy_texts, forget_texts, record_texts
from jkv.state import Metadata
from jkv.status import Counter


def begin(
    metadata: Metadata,
    row: jax.Array,
    salts: jax.Array,
    num_cached: jax.Array,
    tokens: jax.Array | None,
) -> Metadata:
    """Let rows begin with the tokens found, and count the prompts.

    Rows, S where not served, domains and counts found are i32[B]; prompts i32[B, P],
    or None.
    """
    metadata = metadata.with_lengths(row, num_cached)
    metadata = _note_opened(metadata, row, salts, num_cached)
    if tokens is None:
        return metadata
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    metadata = record_texts(metadata, row[:, None], position, tokens)
    served = row < metadata.max_sequences
    asked = (tokens >= 0) & served[:, None]
    sums = {
        Counter.PREFIX_QUERIES: jnp.sum(served, dtype=jnp.int32),
        Counter.PREFIX_TOKENS: jnp.sum(asked, dtype=jnp.int32),
        Counter.PREFIX_HITS: jnp.sum(num_cached, dtype=jnp.int32),
    }
    return counters.add(metadata, sums)


def enter(
    metadata: Metadata, row: jax.Array, salts: jax.Array, known: jax.Array
) -> Metadata:
    """Note the domains of rows from elsewhere, and the tokens visible, i32[B] each."""
    metadata = forget_texts(metadata, row)
    return _note_opened(metadata, row, salts, known)


def inherit(
    metadata: Metadata,
    row: jax.Array,
    parents: jax.Array,
    lengths: jax.Array,
    is_exchange: bool = False,
) -> Metadata:
    """Let rows continue from the first tokens of what their parents are, i32[B] each.

    A row of S or above is dropped. With an exchange a parent may be one of the rows.
    """
    nothing = metadata.max_sequences
    source = jnp.where((row < nothing) & (lengths > 0), parents, nothing)
    metadata = copy_texts(metadata, row, source, is_exchange=is_exchange)
    index = index_of(metadata)
    committed = index.committed.at[parents].get(mode="clip")
    return _note_opened(
        metadata,
        row,
        index.sequence_salts.at[parents].get(mode="clip"),
        jnp.minimum(committed, lengths),
    )


def cut_back(metadata: Metadata, row: jax.Array, lengths: jax.Array) -> Metadata:
    """Note that rows, i32[B], hold no more than these tokens, i32[B], any longer."""
    index = index_of(metadata)
    committed = jnp.minimum(index.committed.at[row].get(mode="clip"), lengths)
    # An empty sequence holds nothing that could be out of date.
    committed = jnp.where(lengths == 0, 0, committed)
    salts = index.sequence_salts.at[row].get(mode="clip")
    return _note_opened(metadata, row, salts, committed)


def _note_opened(
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
