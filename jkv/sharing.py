"""fork, truncate and reorder: sequences that share a past.

Full blocks are shared by naming them in two table rows. A partly filled tail would be
written by both owners, so it is copied at once: after that no block which may be
written has a second owner, and `append` and `write` need neither branch nor copy. (vLLM
delays this copy until a write, as copy-on-write; copying early keeps the branch out of
the step.)
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv import allocation, counters, pool, prefix_index, requests, ring
from jkv.copying import BlockCopies, copy_tokens, with_copies
from jkv.requests import Integers
from jkv.state import Cache, Metadata
from jkv.status import Status


class Fork(NamedTuple):
    """What `fork` answers, one entry per request."""

    seq_ids: jax.Array  # i32[B], the children, -1 where refused or padding
    status: jax.Array  # i32[B], `Status`


def fork(cache: Cache, seq_ids: Integers) -> tuple[Cache, Fork]:
    """Open new sequences that share the past of existing ones.

    A child has its parent's tokens but not its reserved blocks. It costs one block if
    the parent's last block is partly filled, none otherwise. Outside jit this looks on
    the host whether a block must be copied, and copies the storage if so: jit and
    donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int, the parents; one may appear many times, -1 is padding.

    Returns:
      The new cache and a `Fork`. Status: OK, INVALID_SEQUENCE, OUT_OF_SEQUENCES or
      OUT_OF_BLOCKS.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=8, block_size=4, max_sequences=4, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, _ = jkv.append(cache, [0], [6], capacity=6)
      >>> cache, forked = jkv.fork(cache, [0, 0])
      >>> forked.seq_ids.tolist()
      [1, 2]
      >>> [jkv.block_ids(cache, i)[:2].tolist() for i in range(3)]
      [[0, 1], [0, 2], [0, 3]]
    """
    (parents,) = requests.broadcast(seq_ids=seq_ids)
    metadata, result, copies = _fork(cache.metadata, parents)
    return with_copies(cache, metadata, copies), result


def truncate(
    cache: Cache, seq_ids: Integers, lengths: Integers
) -> tuple[Cache, jax.Array]:
    """Drop tokens from the end of sequences, and every block past the new length.

    Reserved blocks go too. If the new last block is partly filled and shared, the
    sequence gets a copy of its own, which takes a block free before the call. Outside
    jit this looks on the host whether a block must be copied, and copies the storage if
    so: jit and donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding.
      lengths: i32[B] or int, tokens to keep, 0 to the context length.

    Returns:
      The new cache and i32[B] of `Status`: OK, INVALID_SEQUENCE, INVALID_ARGUMENT (a
      length below 0 or above the current one) or OUT_OF_BLOCKS.

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


def reorder(
    cache: Cache, seq_ids: Integers, parents: Integers
) -> tuple[Cache, jax.Array]:
    """Let sequence i continue from what its parent was before the call (beam search).

    All requests happen at once: sequences may swap. One that is its own parent stays as
    it is, reservation included; any other gives up all its blocks and shares the
    parent's full ones, with a copy of a partly filled last block. Blocks that the
    sequences of the call give up can be taken in the same call. Outside jit this looks
    on the host whether a block must be copied, and copies the storage if so: jit and
    donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int, sequences to change; -1 is padding.
      parents: i32[B] or int, open sequences, in the call or not; may repeat.

    Returns:
      The new cache and i32[B] of `Status`: OK, INVALID_SEQUENCE (either id) or
      OUT_OF_BLOCKS. If not all fit, the requests that need no block and the longest run
      of the others, in order, that fits together are served.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, block_size=4, max_sequences=2, max_context_length=8)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0, 0])
      >>> cache, _ = jkv.append(cache, [0, 1], [5, 5], capacity=10)
      >>> cache, status = jkv.reorder(cache, [0, 1], [1, 1])
      >>> [jkv.block_ids(cache, i).tolist() for i in (0, 1)]
      [[2, 1], [2, 3]]
    """
    seq_ids, parents = requests.broadcast(seq_ids=seq_ids, parents=parents)
    metadata, status, copies = _reorder(cache.metadata, seq_ids, parents)
    return with_copies(cache, metadata, copies), status


@jax.jit
def _fork(metadata: Metadata, parents: jax.Array) -> tuple[Metadata, Fork, BlockCopies]:
    padding = requests.is_padding(parents)
    live = requests.is_live(metadata, parents)
    eligible = live & ~padding
    length = metadata.context_lengths.at[parents].get(mode="clip")
    num_full, tail = metadata.locate(length)
    need = (eligible & (tail > 0)).astype(jnp.int32)
    no_row, no_block = allocation.lacks_room(metadata, eligible, need)
    status = requests.find_status(
        padding,
        [
            (Status.INVALID_SEQUENCE, ~live),
            (Status.OUT_OF_SEQUENCES, no_row),
            (Status.OUT_OF_BLOCKS, no_block),
        ],
    )
    served = eligible & (status == Status.OK)
    past = metadata.block_tables.at[parents].get(mode="clip")
    metadata, children = allocation.open_sequences(metadata, served)
    metadata = _share(metadata, past, jnp.where(served, num_full, 0))
    metadata, copies = _adopt(metadata, served, children, past, length)
    metadata = prefix_index.inherit(
        metadata, metadata, jnp.where(served, children, metadata.max_sequences), parents
    )
    parent = jnp.where(served, parents, metadata.max_sequences)
    metadata = counters.mark_used(metadata, parent)
    metadata, _ = counters.settle(metadata, status, served, jnp.where(served, need, 0))
    return metadata, Fork(children, status), copies


@jax.jit
def _truncate(
    metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
) -> tuple[Metadata, jax.Array, BlockCopies]:
    padding = requests.is_padding(seq_ids)
    live = requests.is_live_once(metadata, seq_ids)
    length = metadata.context_lengths.at[seq_ids].get(mode="clip")
    mapped = metadata.num_mapped_blocks.at[seq_ids].get(mode="clip")
    causes = [
        (Status.INVALID_SEQUENCE, ~live),
        (Status.INVALID_ARGUMENT, (lengths < 0) | (lengths > length)),
    ]
    status = requests.find_status(padding, causes)
    eligible = (status == Status.OK) & ~padding

    # A kept tail that others share, or that the prefix index can still find, must be
    # copied before it can be written again.
    lengths = jnp.where(eligible, lengths, 0)
    column, tail = metadata.locate(lengths)
    last_block = metadata.block_tables.at[seq_ids, column].get(mode="clip")
    owners = metadata.reference_counts.at[last_block].get(mode="clip")
    copied = (owners > 1) | prefix_index.is_indexed(metadata, last_block)
    copied &= eligible & (tail > 0)
    no_block, _ = requests.lacks_blocks(metadata, copied.astype(jnp.int32))
    status = jnp.where(no_block, jnp.int32(Status.OUT_OF_BLOCKS), status)
    served = eligible & ~no_block
    copied &= served

    kept = allocation.num_blocks_for(metadata, lengths)
    metadata = allocation.release_blocks(
        metadata,
        seq_ids,
        kept - copied.astype(jnp.int32),
        jnp.where(served, mapped, 0),
    )
    metadata, copies = _take_tails(metadata, copied, seq_ids, column, last_block)
    row = jnp.where(served, seq_ids, metadata.max_sequences)
    metadata = dataclasses.replace(
        metadata,
        context_lengths=metadata.context_lengths.at[row].set(lengths, mode="drop"),
        num_mapped_blocks=metadata.num_mapped_blocks.at[row].set(kept, mode="drop"),
    )
    metadata = prefix_index.cut_back(metadata, row, lengths)
    metadata = counters.mark_used(metadata, row)
    metadata, _ = counters.settle(metadata, status, served, copied.astype(jnp.int32))
    return metadata, status, copies


@jax.jit
def _reorder(
    metadata: Metadata, seq_ids: jax.Array, parents: jax.Array
) -> tuple[Metadata, jax.Array, BlockCopies]:
    padding = requests.is_padding(seq_ids)
    live = requests.is_live_once(metadata, seq_ids)
    live &= requests.is_live(metadata, parents)
    moves = live & ~padding & (seq_ids != parents)
    length = metadata.context_lengths.at[parents].get(mode="clip")
    mapped = metadata.num_mapped_blocks.at[seq_ids].get(mode="clip")
    past = metadata.block_tables.at[parents].get(mode="clip")
    num_full, tail = metadata.locate(length)
    needs = moves & (tail > 0)

    def exchange(metadata: Metadata, served: jax.Array) -> Metadata:
        # Shared first, released after: a block that only changes hands stays live.
        metadata = _share(metadata, past, jnp.where(served, num_full, 0))
        last = jnp.where(served, mapped, 0)
        return allocation.release_blocks(metadata, seq_ids, jnp.zeros_like(last), last)

    # Which of those that need a block are served. Usually the free blocks suffice and
    # the loop makes no trip; else ever fewer are tried, with what they would give up.
    rank = ring.running_sum(needs.astype(jnp.int32))
    wanted = rank[-1] if rank.shape[0] else jnp.int32(0)

    def try_fewer(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        num_served, _ = state
        tried = exchange(metadata, moves & ~(needs & (rank > num_served)))
        fits = num_served <= tried.free_blocks.count
        return jnp.where(fits, num_served, num_served - 1), fits

    num_served, _ = jax.lax.while_loop(
        lambda state: ~state[1],
        try_fewer,
        (wanted, wanted <= metadata.free_blocks.count),
    )
    no_block = needs & (rank > num_served)
    status = requests.find_status(
        padding, [(Status.INVALID_SEQUENCE, ~live), (Status.OUT_OF_BLOCKS, no_block)]
    )
    served = moves & ~no_block
    before = metadata
    metadata = exchange(metadata, served)
    metadata, copies = _adopt(metadata, served, seq_ids, past, length)
    row = jnp.where(served, seq_ids, metadata.max_sequences)
    metadata = prefix_index.inherit(metadata, before, row, parents)
    metadata = counters.mark_used(metadata, row)
    copied = (served & needs).astype(jnp.int32)
    metadata, _ = counters.settle(metadata, status, served, copied)
    return metadata, status, copies


def _share(metadata: Metadata, past: jax.Array, num_full: jax.Array) -> Metadata:
    """Count one more owner for the first `num_full` blocks of each row of `past`."""

    def body(
        counts: jax.Array,
        _entry: jax.Array,
        request: jax.Array,
        rank: jax.Array,
        valid: jax.Array,
    ) -> jax.Array:
        block = past.at[request, rank].get(mode="clip")
        block = jnp.where(valid, block, metadata.num_blocks)
        return counts.at[block].add(1, mode="drop")

    counts = requests.for_each_entry(
        num_full, past.size, body, metadata.reference_counts
    )
    return dataclasses.replace(metadata, reference_counts=counts)


def _adopt(
    metadata: Metadata,
    served: jax.Array,
    seq_ids: jax.Array,
    past: jax.Array,
    length: jax.Array,
) -> tuple[Metadata, BlockCopies]:
    """Give sequences with empty rows the past of others, whose owners are counted.

    Args:
      metadata: the state.
      served: bool[B].
      seq_ids: i32[B], the sequences that continue, distinct where served.
      past: i32[B, M], the parents' table rows.
      length: i32[B], the parents' context lengths.
    """
    num_full, tail = metadata.locate(length)
    row = jnp.where(served, seq_ids, metadata.max_sequences)
    column = jnp.arange(past.shape[1], dtype=jnp.int32)
    shared = jnp.where(column[None, :] < num_full[:, None], past, metadata.num_blocks)
    copied = served & (tail > 0)
    source = jnp.take_along_axis(
        past, jnp.minimum(num_full, past.shape[1] - 1)[:, None], axis=1
    )[:, 0]
    mapped = num_full + copied.astype(jnp.int32)
    metadata = dataclasses.replace(
        metadata,
        block_tables=metadata.block_tables.at[row].set(shared, mode="drop"),
        context_lengths=metadata.context_lengths.at[row].set(length, mode="drop"),
        num_mapped_blocks=metadata.num_mapped_blocks.at[row].set(mapped, mode="drop"),
    )
    return _take_tails(metadata, copied, seq_ids, num_full, source)


def _take_tails(
    metadata: Metadata,
    copied: jax.Array,
    seq_ids: jax.Array,
    column: jax.Array,
    source: jax.Array,
) -> tuple[Metadata, BlockCopies]:
    """Map a fresh block at `column` of each sequence that copies its tail.

    Returns:
      The metadata, recorded tokens already copied, and the copies due in storage.
    """
    rank = ring.running_sum(copied.astype(jnp.int32))
    taken = rank[-1] if rank.shape[0] else jnp.int32(0)
    metadata = pool.expose(metadata, taken)
    block = ring.peek(metadata.free_blocks, rank - 1)
    target = jnp.where(copied, block, metadata.num_blocks)
    metadata = allocation.map_blocks(
        metadata, jnp.where(copied, seq_ids, metadata.max_sequences), column, block
    )
    free_blocks = ring.pop(metadata.free_blocks, taken)
    metadata = dataclasses.replace(metadata, free_blocks=free_blocks)
    copies = BlockCopies(source, target)
    return copy_tokens(metadata, copies), copies
