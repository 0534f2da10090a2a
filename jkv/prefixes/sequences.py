"""What the prefix index notes of sequences: domains, texts, how far they are visible.

A sequence has an *epoch*, the clock when it was opened, cut back or reordered last. A
step that was planned in another epoch makes nothing visible.

Texts are the tokens told of sequences, which snapshots take theirs from. Without
snapshots tokens are recorded with the blocks alone, and no text is noted.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jkv.indexing import gather, scatter
from jkv.metadata import counters
from jkv.metadata.entries import for_each_of
from jkv.prefixes.arrays import IndexRow
from jkv.prefixes.prefix_index import index_of, put_index
from jkv.prefixes.snapshots import snapshots_of, with_snapshots
from jkv.sharding.loops import when
from jkv.state import Metadata
from jkv.status import Counter


def begin(
    metadata: Metadata,
    row: jax.Array,  # i32[B], S where not served
    salts: jax.Array,  # i32[B]
    num_cached: jax.Array,  # i32[B]
    tokens: jax.Array | None,  # i32[B, P], the prompts
) -> Metadata:
    """Let rows begin with the tokens found, and count the prompts."""
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
    metadata = _change(metadata, lambda texts: scatter(texts, row, -1))
    return _note_opened(metadata, row, salts, known)


def inherit(
    metadata: Metadata,
    row: jax.Array,
    parents: jax.Array,
    lengths: jax.Array,
    is_exchange: bool = False,
) -> Metadata:
    """Let rows go on from the first tokens of what their parents are, i32[B] each."""
    nothing = metadata.max_sequences
    source = jnp.where((row < nothing) & (lengths > 0), parents, nothing)
    metadata = _copy_texts(metadata, row, source, is_exchange=is_exchange)
    index = index_of(metadata)
    known = index.read(parents)
    committed = jnp.minimum(known.committed, lengths)
    return _note_opened(metadata, row, known.salt, committed)


def cut_back(metadata: Metadata, row: jax.Array, lengths: jax.Array) -> Metadata:
    """Note that rows, i32[B], hold no more than these tokens, i32[B], any longer."""
    index = index_of(metadata)
    known = index.read(row)
    committed = jnp.minimum(known.committed, lengths)
    # An empty sequence holds nothing that could be out of date.
    committed = jnp.where(lengths == 0, 0, committed)
    return _note_opened(metadata, row, known.salt, committed)


def _note_opened(
    metadata: Metadata, row: jax.Array, salts: jax.Array, committed: jax.Array
) -> Metadata:
    """Note the domain of opened rows, i32[B], and the tokens found for them."""
    index, stamp = index_of(metadata), metadata.now + jnp.uint32(1)
    return put_index(metadata, index.write(row, IndexRow(committed, salts, stamp)))


def texts_of(metadata: Metadata, row: jax.Array) -> jax.Array:
    """Return the tokens told of rows, i32[..., X], -1 for none."""
    snapshots = snapshots_of(metadata)
    if snapshots is None:
        return jnp.full((*row.shape, metadata.max_context_length), -1, jnp.int32)
    return gather(snapshots.sequence_texts, row, fill=-1)


def record_texts(
    metadata: Metadata, row: jax.Array, position: jax.Array, tokens: jax.Array
) -> Metadata:
    """Note tokens, i32[...], at positions of rows; a row of S is dropped."""
    return _change(metadata, lambda texts: scatter(texts, (row, position), tokens))


def _copy_texts(
    metadata: Metadata, row: jax.Array, source: jax.Array, *, is_exchange: bool
) -> Metadata:
    """Let rows, i32[B], have the texts of others, S for none, or exchange theirs."""
    is_copied = source < metadata.max_sequences

    def exchange(texts: jax.Array, source: jax.Array) -> jax.Array:
        rows = gather(texts, source)
        return scatter(texts, row, rows)

    def copy(request: jax.Array, texts: jax.Array) -> jax.Array:
        text = gather(texts, gather(source, request))
        return scatter(texts, gather(row, request), text)

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
