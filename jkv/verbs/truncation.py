"""truncate: tokens dropped from the end of sequences."""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.metadata import counters, gaps, requests, sharing, tables
from jkv.metadata.prefixes import prefix_index, sequences
from jkv.metadata.requests import Integers
from jkv.metadata.tails import BlockCopies
from jkv.state import Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.status import Status
from jkv.storage.copies import with_copies


@takes_cache
def truncate(
    cache: Cache, seq_ids: Integers, lengths: Integers
) -> tuple[Cache, jax.Array]:
    """Drop tokens from the end of sequences, and every block past the new length.

    Reserved blocks go too. If the new last block is partly filled and shared, the
    sequence gets a copy of its own, which takes a block free before the call. One that
    nobody shares is kept, and what the prefix index knew past the cut is forgotten.
    Outside jit this looks on the host whether a block must be copied, and copies the
    storage if so: jit and donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding.
      lengths: i32[B] or int, tokens to keep, 0 to the context length. With a sliding
        window, what the row after them sees must be kept still: the last `append` can
        always be undone, and a sequence can begin anew from 0.

    Returns:
      The new cache and i32[B] of `Status`: OK, INVALID_SEQUENCE, INVALID_ARGUMENT (a
      length below 0, above the current one or below the window) or OUT_OF_BLOCKS.

    Raises:
      ValueError: for arguments that are no integers, have more than one axis, or differ
        in length.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=4, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, _ = jkv.append(cache, [0], [10], capacity=10)
      >>> cache, status = jkv.truncate(cache, [0], [5])
      >>> int(cache.metadata.context_lengths[0]), int(jkv.num_free_blocks(cache))
      (5, 6)
    """
    seq_ids, lengths = requests.broadcast(seq_ids=seq_ids, lengths=lengths)
    metadata, status, copies = _truncate(cache.metadata, seq_ids, lengths)
    return with_copies(cache, metadata, copies), status


@jax.jit
def _truncate(
    metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
) -> tuple[Metadata, jax.Array, BlockCopies]:
    padding = requests.is_padding(seq_ids)
    live = requests.is_live_once(metadata, seq_ids)
    length = metadata.context_lengths.at[seq_ids].get(mode="clip")
    mapped = metadata.num_mapped_blocks.at[seq_ids].get(mode="clip")
    wrong = (lengths < 0) | (lengths > length)
    if metadata.window is not None:
        wrong |= gaps.cut_off(metadata, seq_ids, lengths)
    causes = [(Status.INVALID_SEQUENCE, ~live), (Status.INVALID_ARGUMENT, wrong)]
    status = requests.find_status(padding, causes)
    eligible = (status == Status.OK) & ~padding

    lengths = jnp.where(eligible, lengths, 0)
    column, tail = tables.locate(metadata, lengths)
    last_block = metadata.block_tables.at[seq_ids, column].get(mode="clip")
    is_shared = metadata.reference_counts.at[last_block].get(mode="clip") > 1
    copied = eligible & (tail > 0) & is_shared
    no_block, _ = requests.lacks_blocks(metadata, copied.astype(jnp.int32))
    status = jnp.where(no_block, jnp.int32(Status.OUT_OF_BLOCKS), status)
    served = eligible & ~no_block
    copied &= served

    kept = tables.num_blocks_for(metadata, lengths)
    metadata = tables.release_blocks(
        metadata,
        seq_ids,
        kept - copied.astype(jnp.int32),
        jnp.where(served, mapped, 0),
    )
    metadata, copies = sharing.take_tails(metadata, copied, seq_ids, column, last_block)
    rewritten = served & (tail > 0) & ~copied
    metadata = prefix_index.forget_from(
        metadata, jnp.where(rewritten, last_block, metadata.num_blocks)
    )
    row = jnp.where(served, seq_ids, metadata.max_sequences)
    metadata = dataclasses.replace(
        metadata,
        context_lengths=metadata.context_lengths.at[row].set(lengths, mode="drop"),
        num_mapped_blocks=metadata.num_mapped_blocks.at[row].set(kept, mode="drop"),
    )
    emptied = jnp.where(lengths == 0, row, metadata.max_sequences)
    metadata = gaps.set_gap(metadata, emptied, 0)
    metadata = sequences.cut_back(metadata, row, lengths)
    metadata = counters.mark_used(metadata, row)
    metadata, _ = counters.settle(metadata, status, served, copied.astype(jnp.int32))
    return metadata, status, copies
