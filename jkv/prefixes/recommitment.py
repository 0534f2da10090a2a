"""Commit of swapped-in sequences.

`swap_in` opens sequences with unindexed blocks. If they were committed before and with
the present weights, they can be committed again: an engine that parked a request makes
its prefix available to the next one.
"""

import jax
import jax.numpy as jnp

from jkv.indexing import gather
from jkv.metadata import requests
from jkv.metadata.requests import Integers, Texts
from jkv.prefixes.prefix_index import index_of, put_index
from jkv.prefixes.sequences import record_texts
from jkv.state import Batch, Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.verbs.commitment import commit


@takes_cache()
def recommit(
    cache: Cache,  # with `prefix_caching`
    # i32[B] or int, from `swap_in`, with nothing appended since; -1 is padding.
    seq_ids: Integers,
    tokens: Texts,  # i32[B, P], their tokens, padded with -1, for snapshots
) -> Cache:
    """Commit the full blocks of sequences, as if one step had filled them.

    Blocks are indexed under their recorded tokens; a block with an indexed equal is
    released, as by `commit`. With states a snapshot is taken of sequences of a suitable
    length. Pruned sequences, and ones with released blocks in the leading group, commit
    nothing, as the prefix of their other blocks is unknown.
    """
    (seq_ids,) = requests.broadcast(seq_ids=seq_ids)
    metadata = _forget_committed(cache.metadata, seq_ids)
    metadata = _note_texts(metadata, seq_ids, requests.as_prompts(tokens))
    cache = cache.with_metadata(metadata)
    return commit(cache, _plan_whole(cache, seq_ids))


def _forget_committed(metadata: Metadata, seq_ids: jax.Array) -> Metadata:
    """Reset the committed lengths of sequences that have all their blocks."""
    is_whole = requests.is_live_once(metadata, seq_ids)
    if metadata.block_numbers:
        is_whole &= metadata.leading.window.gaps_of(jnp.maximum(seq_ids, 0)) == 0
    is_whole &= ~metadata.sequences.pruned.is_pruned(seq_ids)
    row = jnp.where(is_whole, seq_ids, metadata.max_sequences)
    index = index_of(metadata)
    rows = index.read(row)._replace(committed=jnp.zeros_like(row))
    return put_index(metadata, index.write(row, rows))


def _note_texts(metadata: Metadata, seq_ids: jax.Array, tokens: jax.Array) -> Metadata:
    """Record the tokens of sequences, if there are snapshots."""
    if metadata.index.snapshot_every is None:
        return metadata
    is_live = requests.is_live_once(metadata, seq_ids)
    is_live &= ~metadata.sequences.pruned.is_pruned(seq_ids)
    row = jnp.where(is_live, seq_ids, metadata.max_sequences)[:, None]
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    length = gather(metadata.context_lengths, seq_ids)[:, None]
    told = jnp.where(position < length, tokens, -1)
    return record_texts(metadata, row, position, told)


def _plan_whole(cache: Cache, seq_ids: jax.Array) -> Batch:
    """Return a step that would have appended all tokens of sequences."""
    metadata, num_rows = cache.metadata, cache.max_context_length
    is_live = requests.is_live_once(metadata, seq_ids)
    lengths = gather(metadata.context_lengths, seq_ids)
    lengths = jnp.where(is_live, lengths, 0)
    none = jnp.zeros((len(seq_ids) * num_rows,), jnp.int32)
    return Batch(
        seq_ids=seq_ids,
        status=jnp.zeros_like(seq_ids),
        query_starts=jnp.cumsum(lengths, dtype=jnp.int32) - lengths,
        query_lengths=lengths,
        context_lengths=lengths,
        positions=none,
        valid=none > 0,
        offsets=none,
        blocks_of_groups=tuple(
            none + g.num_blocks if g.kind == "blocks" else None for g in metadata.groups
        ),
        epochs=index_of(metadata).read(seq_ids).epoch,
        is_decoding=False,
        sizes=cache.sizes,
    )
