"""Making visible again what sequences brought back from the host.

`swap_in` opens sequences whose blocks are in no index. Where it is known that they are
what `commit` had made visible, and of the present weights, they can be made so again:
an engine that parked a text lets the next request find it.
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
    tokens: Texts,  # i32[B, P], their texts, -1 after each one's end, for snapshots
) -> Cache:
    """Make the full blocks of sequences visible, as if one step had filled them.

    Blocks are entered under the tokens that were recorded of them; one that has an
    equal in the index is given back, as by `commit`. With states a snapshot is made of
    a sequence that has a length for one. Nothing becomes visible of a sequence whose
    leading group has given blocks back: what leads up to the others is not known.
    """
    (seq_ids,) = requests.broadcast(seq_ids=seq_ids)
    metadata = _forget_committed(cache.metadata, seq_ids)
    metadata = _note_texts(metadata, seq_ids, requests.as_prompts(tokens))
    cache = cache.with_metadata(metadata)
    return commit(cache, _plan_whole(cache, seq_ids))


def _forget_committed(metadata: Metadata, seq_ids: jax.Array) -> Metadata:
    """Let sequences that have all of their blocks commit from their beginning on."""
    is_whole = requests.is_live_once(metadata, seq_ids)
    if metadata.block_numbers:
        is_whole &= metadata.leading.window.gaps_of(jnp.maximum(seq_ids, 0)) == 0
    row = jnp.where(is_whole, seq_ids, metadata.max_sequences)
    index = index_of(metadata)
    rows = index.read(row)._replace(committed=jnp.zeros_like(row))
    return put_index(metadata, index.write(row, rows))


def _note_texts(metadata: Metadata, seq_ids: jax.Array, tokens: jax.Array) -> Metadata:
    """Tell the texts of sequences to what keeps them for snapshots."""
    if metadata.index.snapshot_every is None:
        return metadata
    is_live = requests.is_live_once(metadata, seq_ids)
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
