"""The prefix index's records of sequences: salts, tokens and committed lengths.

A sequence has an *epoch*, the tick of its opening, last truncation or reordering. A
step planned in another epoch commits nothing.

`sequence_tokens` has the recorded tokens of sequences, which snapshots copy. Without
snapshots, tokens are recorded only with the blocks.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jkv.metadata import requests
from jkv.operations import for_each_of, gather, scatter, when
from jkv.prefixes.arrays import IndexRow
from jkv.prefixes.prefix_index import index_of, put_index
from jkv.prefixes.snapshots import snapshots_of, with_snapshots
from jkv.state import Metadata
from jkv.status import Counter


def begin(
    metadata: Metadata,
    row: jax.Array,  # i32[B], S where not served
    salts: jax.Array,  # i32[B]
    num_cached: jax.Array,  # i32[B]
    tokens: jax.Array | None,  # i32[B, P], the prompts
) -> Metadata:
    """Open rows with the tokens found, and count the queries and hits."""
    metadata = _note_opened(metadata, row, salts, num_cached)
    if tokens is None:
        return metadata
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    metadata = record_tokens(metadata, row[:, None], position, tokens)
    served = row < metadata.max_sequences
    looked_up = (tokens >= 0) & served[:, None]
    sums = {
        Counter.PREFIX_QUERIES: jnp.sum(served, dtype=jnp.int32),
        Counter.PREFIX_TOKENS: jnp.sum(looked_up, dtype=jnp.int32),
        Counter.PREFIX_HITS: jnp.sum(num_cached, dtype=jnp.int32),
    }
    return requests.add_counts(metadata, sums)


def enter(
    metadata: Metadata, row: jax.Array, salts: jax.Array, known: jax.Array
) -> Metadata:
    """Set the salts and committed tokens of swapped-in rows, i32[B] each."""
    metadata = _change(metadata, lambda recorded: scatter(recorded, row, -1))
    return _note_opened(metadata, row, salts, known)


def inherit(
    metadata: Metadata,
    row: jax.Array,
    parents: jax.Array,
    lengths: jax.Array,
    is_exchange: bool = False,
) -> Metadata:
    """Copy the parents' salts and tokens to rows, capped at `lengths`, i32[B] each."""
    nothing = metadata.max_sequences
    source = jnp.where((row < nothing) & (lengths > 0), parents, nothing)
    metadata = _copy_tokens(metadata, row, source, is_exchange=is_exchange)
    index = index_of(metadata)
    known = index.read(parents)
    committed = jnp.minimum(known.committed, lengths)
    pruned = metadata.sequences.pruned
    if pruned.is_there:  # a sequence without tokens of a pruned one commits again
        starts_anew = (lengths == 0) & ~pruned.is_pruned(row)
        committed = jnp.where(starts_anew, 0, committed)
    return _note_opened(metadata, row, known.salt, committed)


def cap_committed(metadata: Metadata, row: jax.Array, lengths: jax.Array) -> Metadata:
    """Cap the committed tokens of rows, i32[B], at `lengths`, i32[B]."""
    index = index_of(metadata)
    known = index.read(row)
    committed = jnp.minimum(known.committed, lengths)
    # An empty sequence has no stale contents and may commit again.
    committed = jnp.where(lengths == 0, 0, committed)
    return _note_opened(metadata, row, known.salt, committed)


def _note_opened(
    metadata: Metadata, row: jax.Array, salts: jax.Array, committed: jax.Array
) -> Metadata:
    """Set the salt and committed tokens of rows, i32[B], in a new epoch."""
    index, stamp = index_of(metadata), metadata.now + jnp.uint32(1)
    return put_index(metadata, index.write(row, IndexRow(committed, salts, stamp)))


def tokens_of(metadata: Metadata, row: jax.Array) -> jax.Array:
    """Return the recorded tokens of rows, i32[..., X], -1 for none."""
    snapshots = snapshots_of(metadata)
    if snapshots is None:
        return jnp.full((*row.shape, metadata.max_context_length), -1, jnp.int32)
    return gather(snapshots.sequence_tokens, row, fill=-1)


def record_tokens(
    metadata: Metadata, row: jax.Array, position: jax.Array, tokens: jax.Array
) -> Metadata:
    """Record tokens, i32[...], at positions of rows; S is dropped."""
    return _change(
        metadata, lambda recorded: scatter(recorded, (row, position), tokens)
    )


def _copy_tokens(
    metadata: Metadata, row: jax.Array, source: jax.Array, *, is_exchange: bool
) -> Metadata:
    """Copy other rows' tokens, i32[B], S for none; an exchange reads all first."""
    is_copied = source < metadata.max_sequences

    def exchange(recorded: jax.Array, source: jax.Array) -> jax.Array:
        rows = gather(recorded, source)
        return scatter(recorded, row, rows)

    def copy(request: jax.Array, recorded: jax.Array) -> jax.Array:
        tokens = gather(recorded, gather(source, request))
        return scatter(recorded, gather(row, request), tokens)

    if is_exchange:
        return _change(
            metadata,
            lambda recorded: when(jnp.any(is_copied), exchange, recorded, source),
        )
    return _change(metadata, lambda recorded: for_each_of(is_copied, copy, recorded))


def _change(metadata: Metadata, change: Callable[[jax.Array], jax.Array]) -> Metadata:
    """Return the metadata with other recorded tokens, if there are snapshots."""
    snapshots = snapshots_of(metadata)
    if snapshots is None:
        return metadata
    return with_snapshots(metadata, sequence_tokens=change(snapshots.sequence_tokens))
