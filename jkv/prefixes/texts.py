"""The tokens told of each sequence, which snapshots take their texts from.

Without snapshots they are recorded with the blocks alone, and nothing is noted here.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jkv.metadata.entries import for_each_of
from jkv.prefixes.snapshots import snapshots_of, with_snapshots
from jkv.sharding.loops import when
from jkv.state import Metadata


def texts_of(metadata: Metadata, row: jax.Array) -> jax.Array:
    """Return the tokens told of rows, i32[..., X], -1 for none."""
    snapshots = snapshots_of(metadata)
    if snapshots is None:
        return jnp.full((*row.shape, metadata.max_context_length), -1, jnp.int32)
    return snapshots.sequence_texts.at[row].get(mode="fill", fill_value=-1)


def record_texts(
    metadata: Metadata, row: jax.Array, position: jax.Array, tokens: jax.Array
) -> Metadata:
    """Note tokens, i32[...], at positions of rows; a row of S is dropped."""
    return _change(
        metadata, lambda texts: texts.at[row, position].set(tokens, mode="drop")
    )


def forget_texts(metadata: Metadata, row: jax.Array) -> Metadata:
    """Note that no token of rows, i32[B], is told; a row of S is dropped."""
    return _change(metadata, lambda texts: texts.at[row].set(-1, mode="drop"))


def copy_texts(
    metadata: Metadata, row: jax.Array, source: jax.Array, *, is_exchange: bool
) -> Metadata:
    """Let rows, i32[B], have the texts of others, i32[B]; a source of S is none.

    With an exchange a source may be a row: all are read before any is written.
    """
    is_copied = source < metadata.max_sequences

    def exchange(texts: jax.Array, source: jax.Array) -> jax.Array:
        rows = texts.at[source].get(mode="clip")
        return texts.at[row].set(rows, mode="drop")

    def copy(request: jax.Array, texts: jax.Array) -> jax.Array:
        text = texts.at[source[request]].get(mode="clip")
        return texts.at[row[request]].set(text, mode="drop")

    if is_exchange:
        return _change(
            metadata, lambda texts: when(jnp.any(is_copied), exchange, texts, source)
        )
    return _change(metadata, lambda texts: for_each_of(is_copied, copy, texts))


def _change(metadata: Metadata, change: Callable[[jax.Array], jax.Array]) -> Metadata:
    """Return the metadata with other texts of sequences, where there are snapshots."""
    snapshots = snapshots_of(metadata)
    if snapshots is None:
        return metadata
    return with_snapshots(metadata, sequence_texts=change(snapshots.sequence_texts))
