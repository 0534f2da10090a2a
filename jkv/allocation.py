"""allocate and free: a sequence's row and its blocks, handed out and taken back.

Block ids are taken from the head of a FIFO ring and returned at its tail, a sequence's
last block first, so a pool that has been used hands out the blocks that have been free
longest. A request is served whole or not at all.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv import counters, requests, ring
from jkv.requests import Integers
from jkv.state import NO_SEQUENCE, Cache, Metadata
from jkv.status import Status


class Allocation(NamedTuple):
    """What `allocate` answers, one entry per request."""

    seq_ids: jax.Array  # i32[B], the opened sequences, -1 where refused or padding
    status: jax.Array  # i32[B], `Status`
    num_cached: jax.Array  # i32[B], tokens found in the prefix index (0 without one)


def allocate(
    cache: Cache,
    num_tokens: Integers,
    *,
    tokens: jax.Array | None = None,
    salts: jax.Array | None = None,
) -> tuple[Cache, Allocation]:
    """Open B sequences, each with blocks reserved for `num_tokens` tokens.

    A new sequence has context length 0; the reservation only says how far `append` can
    go without asking the pool.

    Args:
      cache: the cache.
      num_tokens: i32[B] or int; 0 reserves nothing, -1 is padding.
      tokens: i32[B, P], the prompts, -1 after each one's end, matched against the
        prefix index. Without prefix caching nothing can match.
      salts: i32[B], separate domains of the prefix index.

    Returns:
      The new cache and an `Allocation`. Status: OK, INVALID_ARGUMENT (below -1),
      CONTEXT_FULL (above `max_context_length`), OUT_OF_SEQUENCES or OUT_OF_BLOCKS.

    Raises:
      ValueError: for arguments of wrong type or shape.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, block_size=4, max_sequences=8, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [9, 5, 0])
      >>> opened.seq_ids.tolist(), opened.status.tolist()
      ([0, -1, 1], [0, 1, 0])
    """
    (num_tokens,) = requests.broadcast(num_tokens=num_tokens)
    _check_prompts(num_tokens.shape[0], tokens, salts)
    metadata, result = _allocate(cache.metadata, num_tokens)
    return dataclasses.replace(cache, metadata=metadata), result


def can_allocate(cache: Cache, num_tokens: Integers) -> jax.Array:
    """Return which requests `allocate` would serve if called with them now, bool[B].

    Args:
      cache: the cache.
      num_tokens: i32[B] or int, as for `allocate`; padding counts as served.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, block_size=4, max_sequences=8, max_context_length=16)
      >>> jkv.can_allocate(jkv.init(config), [16, 1]).tolist()
      [True, False]
    """
    (num_tokens,) = requests.broadcast(num_tokens=num_tokens)
    return _can_allocate(cache.metadata, num_tokens)


def free(cache: Cache, seq_ids: Integers) -> tuple[Cache, jax.Array]:
    """Close sequences; blocks that no other sequence shares return to the pool.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding.

    Returns:
      The new cache and i32[B] of `Status`: OK, or INVALID_SEQUENCE for an id that is
      not open or was named before in this call.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [64])
      >>> cache, status = jkv.free(cache, [0, 0, -1])
      >>> status.tolist(), int(jkv.num_free_blocks(cache))
      ([0, 5, 0], 4)
    """
    (seq_ids,) = requests.broadcast(seq_ids=seq_ids)
    metadata, status = _free(cache.metadata, seq_ids)
    return dataclasses.replace(cache, metadata=metadata), status


@jax.jit
def _allocate(metadata: Metadata, num_tokens: jax.Array) -> tuple[Metadata, Allocation]:
    status, need = _plan(metadata, num_tokens)
    served = (status == Status.OK) & (num_tokens != NO_SEQUENCE)
    metadata, seq_ids = open_sequences(metadata, served)
    need = jnp.where(served, need, 0)

    # Entry e of the call's reservations is block e of the ring.
    def reserve(
        metadata: Metadata,
        entry: jax.Array,
        request: jax.Array,
        rank: jax.Array,
        valid: jax.Array,
    ) -> Metadata:
        row = jnp.where(valid, seq_ids[request], metadata.max_sequences)
        return map_blocks(metadata, row, rank, ring.peek(metadata.free_blocks, entry))

    most = min(metadata.num_blocks, need.shape[0] * metadata.max_blocks_per_sequence)
    metadata = requests.for_each_entry(need, most, reserve, metadata)
    row = jnp.where(served, seq_ids, metadata.max_sequences)
    metadata, taken = counters.settle(metadata, status, served, need)
    metadata = dataclasses.replace(
        metadata,
        num_mapped_blocks=metadata.num_mapped_blocks.at[row].set(need, mode="drop"),
        free_blocks=ring.pop(metadata.free_blocks, taken),
    )
    num_cached = jnp.zeros_like(seq_ids)
    return metadata, Allocation(seq_ids, status, num_cached)


@jax.jit
def _can_allocate(metadata: Metadata, num_tokens: jax.Array) -> jax.Array:
    return _plan(metadata, num_tokens)[0] == Status.OK


@jax.jit
def _free(metadata: Metadata, seq_ids: jax.Array) -> tuple[Metadata, jax.Array]:
    padding = requests.is_padding(seq_ids)
    closable = requests.is_live(metadata, seq_ids)
    closable &= requests.is_first_mention(metadata, seq_ids)
    status = requests.find_status(padding, [(Status.INVALID_SEQUENCE, ~closable)])
    mapped = metadata.num_mapped_blocks.at[seq_ids].get(mode="clip")
    metadata = release_blocks(
        metadata, seq_ids, jnp.zeros_like(mapped), jnp.where(closable, mapped, 0)
    )
    row = jnp.where(closable, seq_ids, metadata.max_sequences)
    metadata = dataclasses.replace(
        metadata,
        context_lengths=metadata.context_lengths.at[row].set(0, mode="drop"),
        num_mapped_blocks=metadata.num_mapped_blocks.at[row].set(0, mode="drop"),
        is_open=metadata.is_open.at[row].set(False, mode="drop"),
        free_sequences=ring.push(metadata.free_sequences, seq_ids, closable),
    )
    metadata, _ = counters.settle(metadata, status, closable)
    return metadata, status


def _plan(metadata: Metadata, num_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return status and blocks needed of each `allocate` request, i32[B] each."""
    padding = num_tokens == NO_SEQUENCE
    negative = num_tokens < 0
    too_long = num_tokens > metadata.max_context_length
    eligible = ~(negative | too_long)
    need = jnp.where(eligible, num_blocks_for(metadata, num_tokens), 0)
    no_row, no_block = lacks_room(metadata, eligible, need)
    status = requests.find_status(
        padding,
        [
            (Status.INVALID_ARGUMENT, negative),
            (Status.CONTEXT_FULL, too_long),
            (Status.OUT_OF_SEQUENCES, no_row),
            (Status.OUT_OF_BLOCKS, no_block),
        ],
    )
    return status, need


def num_blocks_for(metadata: Metadata, num_tokens: jax.Array) -> jax.Array:
    """Return ceil(num_tokens / T) without the sum that could overflow."""
    full, rest = jnp.divmod(num_tokens, metadata.block_size)
    return full + (rest > 0).astype(jnp.int32)


def lacks_room(
    metadata: Metadata, eligible: jax.Array, need: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return which requests find no free row and which no free blocks, bool[B] each.

    A request refused for want of blocks leaves its row to later ones.

    Args:
      metadata: the state before the call.
      eligible: bool[B], requests not refused for another cause, which want a row each.
      need: i32[B], blocks wanted, 0 where not eligible.
    """
    no_block, _ = requests.lacks_blocks(metadata, need)
    takes_row = eligible & ~no_block
    takes = takes_row.astype(jnp.int32)
    taken_before = ring.running_sum(takes) - takes
    return eligible & (taken_before >= metadata.free_sequences.count), no_block


def open_sequences(metadata: Metadata, served: jax.Array) -> tuple[Metadata, jax.Array]:
    """Take a free row for each served request.

    Returns:
      The metadata, and i32[B] of sequence ids, -1 where not served.
    """
    ranks = ring.running_sum(served.astype(jnp.int32))
    row = ring.peek(metadata.free_sequences, ranks - 1)
    seq_ids = jnp.where(served, row, NO_SEQUENCE)
    row = jnp.where(served, row, metadata.max_sequences)
    num = ranks[-1] if ranks.shape[0] else jnp.int32(0)
    metadata = dataclasses.replace(
        metadata,
        is_open=metadata.is_open.at[row].set(True, mode="drop"),
        free_sequences=ring.pop(metadata.free_sequences, num),
    )
    return counters.mark_opened(metadata, row), seq_ids


def map_blocks(
    metadata: Metadata, row: jax.Array, column: jax.Array, block: jax.Array
) -> Metadata:
    """Enter fresh blocks, i32[P], in the tables; a row of S or above is dropped."""
    block = jnp.where(row < metadata.max_sequences, block, metadata.num_blocks)
    return dataclasses.replace(
        metadata,
        block_tables=metadata.block_tables.at[row, column].set(block, mode="drop"),
        reference_counts=metadata.reference_counts.at[block].set(1, mode="drop"),
    )


def release_blocks(
    metadata: Metadata, seq_ids: jax.Array, first: jax.Array, last: jax.Array
) -> Metadata:
    """Unmap table columns first..last-1 of each sequence, the last column first.

    A block whose reference count reaches zero enters the ring, at the turn of its last
    mention. Lengths and the number of mapped blocks are the caller's to set.

    Args:
      metadata: the state.
      seq_ids: i32[B], distinct where first < last.
      first: i32[B].
      last: i32[B]; no column is released where last <= first.
    """
    return requests.for_each_entry(
        jnp.maximum(last - first, 0),
        seq_ids.shape[0] * metadata.max_blocks_per_sequence,
        functools.partial(_release_entries, seq_ids, last),
        metadata,
    )


def _release_entries(
    seq_ids: jax.Array,
    last: jax.Array,
    metadata: Metadata,
    _entry: jax.Array,
    request: jax.Array,
    rank: jax.Array,
    valid: jax.Array,
) -> Metadata:
    """Release one table entry per lane, i32[P]."""
    num_blocks = metadata.num_blocks
    row = jnp.where(valid, seq_ids[request], metadata.max_sequences)
    column = last[request] - 1 - rank
    block = metadata.block_tables.at[row, column].get(
        mode="fill", fill_value=num_blocks
    )
    counts = metadata.reference_counts.at[block].add(-1, mode="drop")
    dropped = counts.at[block].get(mode="fill", fill_value=1) == 0

    # Several lanes may have brought one block to zero: the last of them returns it. The
    # zeroed counts themselves serve as scratch to find that lane (a scratch array of
    # their own would cost a pass over the pool): -1 - lane, so that the minimum wins.
    lane = -1 - jnp.arange(block.shape[0], dtype=jnp.int32)
    zeroed = jnp.where(dropped, block, num_blocks)
    counts = counts.at[zeroed].min(lane, mode="drop")
    returns = counts.at[zeroed].get(mode="fill", fill_value=1) == lane
    counts = counts.at[zeroed].set(0, mode="drop")
    return dataclasses.replace(
        metadata,
        block_tables=metadata.block_tables.at[row, column].set(num_blocks, mode="drop"),
        reference_counts=counts,
        free_blocks=ring.push(metadata.free_blocks, block, returns),
    )


def _check_prompts(
    num_requests: int, tokens: jax.Array | None, salts: jax.Array | None
) -> None:
    """Reject prompts and salts that do not fit the requests."""
    if tokens is not None and (tokens.ndim != 2 or tokens.shape[0] != num_requests):
        raise ValueError(
            f"tokens must be i32[B, P] with B = {num_requests} requests, got "
            f"{tokens.dtype}{list(tokens.shape)}"
        )
    if salts is not None and salts.shape != (num_requests,):
        raise ValueError(
            f"salts must be i32[B] with B = {num_requests} requests, got "
            f"{salts.dtype}{list(salts.shape)}"
        )
