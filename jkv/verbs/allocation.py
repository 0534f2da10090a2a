"""allocate and free: a sequence's row and its blocks, handed out and taken back.

Block ids are taken from the head of a FIFO ring and returned at its tail, a sequence's
last block first, so a pool that has been used hands out the blocks that have been free
longest. A request is served whole or not at all.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import allocator, counters, requests, ring, sharing, tables
from jkv.metadata.entries import for_each_entry
from jkv.metadata.prefixes import prefix_index, search
from jkv.metadata.prefixes.search import Found
from jkv.metadata.requests import Integers
from jkv.metadata.sharing import BlockCopies
from jkv.state import NO_SEQUENCE, Cache, Metadata
from jkv.status import Counter, Status
from jkv.storage.copies import with_copies


class Allocation(NamedTuple):
    """What `allocate` answers, one entry per request."""

    seq_ids: jax.Array  # i32[B], the opened sequences, -1 where refused or padding
    status: jax.Array  # i32[B], `Status`
    num_cached: jax.Array  # i32[B], tokens of the prompt that need not be computed


def allocate(
    cache: Cache,
    num_tokens: Integers,
    *,
    tokens: jax.Array | None = None,
    salts: Integers = 0,
) -> tuple[Cache, Allocation]:
    """Open B sequences, each with blocks reserved for `num_tokens` tokens.

    A new sequence has context length 0; the reservation only says how far `append` can
    go without asking the pool. With prefix caching, a prompt that begins like cached
    ones starts with what they have in common: whole blocks are shared, and the part of
    a block that agrees is copied into one of its own. Outside jit this looks on the
    host whether a block must be copied, and copies the storage if so: jit and donate.

    Args:
      cache: the cache.
      num_tokens: i32[B] or int; 0 reserves nothing, -1 is padding. What is found of a
        prompt counts as part of it.
      tokens: i32[B, P], the prompts, -1 after each one's end, matched against the
        prefix index. Without prefix caching nothing can match.
      salts: i32[B] or int, domains that share nothing (tenants, adapters, versions of
        the weights); 0 unless given.

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
    if tokens is not None:
        tokens = requests.as_prompts(tokens)
    num_prompts = None if tokens is None else tokens.shape[0]
    num_tokens, salts = requests.broadcast(
        num_prompts, num_tokens=num_tokens, salts=salts
    )
    metadata, result, copies = _allocate(
        cache.metadata,
        num_tokens,
        tokens if cache.metadata.prefix is not None else None,
        salts,
    )
    if copies is None:
        return dataclasses.replace(cache, metadata=metadata), result
    return with_copies(cache, metadata, copies), result


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
def _allocate(
    metadata: Metadata,
    num_tokens: jax.Array,
    tokens: jax.Array | None,
    salts: jax.Array,
) -> tuple[Metadata, Allocation, BlockCopies | None]:
    found = None if tokens is None else search.find(metadata, tokens, salts)
    metadata, plan = _decide(metadata, num_tokens, found)
    served = (plan.status == Status.OK) & (num_tokens != NO_SEQUENCE)
    fresh = jnp.where(served, plan.num_fresh, 0)
    metadata, seq_ids = tables.open_rows(metadata, served)
    row = jnp.where(served, seq_ids, metadata.max_sequences)

    # Found blocks are pinned before any block is taken, so that none of them is.
    metadata = _share_found(metadata, row, found)
    num_found = jnp.zeros_like(fresh) if found is None else found.num_blocks
    taken = jnp.sum(fresh, dtype=jnp.int32)
    metadata = allocator.expose(metadata, taken)

    # Entry e of the call's reservations is block e of the ring.
    def reserve(
        metadata: Metadata,
        entry: jax.Array,
        request: jax.Array,
        rank: jax.Array,
        valid: jax.Array,
    ) -> Metadata:
        seq_id = jnp.where(valid, seq_ids[request], metadata.max_sequences)
        column = num_found[request] + rank
        block = ring.peek(metadata.free_blocks, entry)
        return tables.map_blocks(metadata, seq_id, column, block)

    most = min(metadata.num_blocks, fresh.shape[0] * metadata.max_blocks_per_sequence)
    mapped = metadata.num_mapped_blocks.at[row].set(num_found + fresh, mode="drop")
    metadata = dataclasses.replace(metadata, num_mapped_blocks=mapped)
    metadata = for_each_entry(fresh, most, reserve, metadata)
    free_blocks = ring.pop(metadata.free_blocks, taken)
    metadata = dataclasses.replace(metadata, free_blocks=free_blocks)
    num_cached, copies = jnp.zeros_like(seq_ids), None
    if found is not None:
        num_cached = jnp.where(served, found.num_tokens(metadata.block_size), 0)
        metadata, copies = _copy_part(metadata, row, found)
        lengths = metadata.context_lengths.at[row].set(num_cached, mode="drop")
        metadata = dataclasses.replace(metadata, context_lengths=lengths)
        metadata = _count_queries(metadata, served, tokens, num_cached)
    metadata = prefix_index.note_opened(metadata, row, salts, num_cached)
    metadata, _ = counters.settle(metadata, plan.status, served, fresh)
    return metadata, Allocation(seq_ids, plan.status, num_cached), copies


@jax.jit
def _can_allocate(metadata: Metadata, num_tokens: jax.Array) -> jax.Array:
    return _decide(metadata, num_tokens, None)[1].status == Status.OK


@jax.jit
def _free(metadata: Metadata, seq_ids: jax.Array) -> tuple[Metadata, jax.Array]:
    padding = requests.is_padding(seq_ids)
    closable = requests.is_live_once(metadata, seq_ids)
    status = requests.find_status(padding, [(Status.INVALID_SEQUENCE, ~closable)])
    metadata = tables.close_rows(metadata, seq_ids, closable)
    metadata, _ = counters.settle(metadata, status, closable)
    return metadata, status


class _Decision(NamedTuple):
    """What becomes of each `allocate` request."""

    status: jax.Array  # i32[B], `Status`
    num_fresh: jax.Array  # i32[B], blocks to take from the ring's head


def _decide(
    metadata: Metadata, num_tokens: jax.Array, found: Found | None
) -> tuple[Metadata, _Decision]:
    """Decide on `allocate` requests; the metadata comes back as it was."""
    padding = num_tokens == NO_SEQUENCE
    negative = num_tokens < 0
    too_long = num_tokens > metadata.max_context_length
    eligible = ~(negative | too_long)
    fresh = jnp.where(eligible, tables.num_blocks_for(metadata, num_tokens), 0)
    first = jnp.zeros_like(fresh)
    wants = fresh > 0
    if found is not None:
        # Blocks found need not be taken, but cached ones are free no more.
        cached = tables.num_blocks_for(metadata, found.num_tokens(metadata.block_size))
        fresh = jnp.maximum(fresh, cached) - found.num_blocks
        fresh = jnp.where(eligible, fresh, 0)
        blocks = jnp.where(eligible[:, None], found.blocks, metadata.num_blocks)
        metadata, revivals = allocator.first_revivals(metadata, blocks.reshape(-1))
        counts = metadata.reference_counts.at[blocks].get(mode="fill", fill_value=1)
        first = jnp.sum(revivals.reshape(blocks.shape), axis=1, dtype=jnp.int32)
        wants = (fresh > 0) | jnp.any(counts == 0, axis=1)
    no_row, no_block = tables.lacks_room(metadata, eligible, fresh + first, wants)
    status = requests.find_status(
        padding,
        [
            (Status.INVALID_ARGUMENT, negative),
            (Status.CONTEXT_FULL, too_long),
            (Status.OUT_OF_SEQUENCES, no_row),
            (Status.OUT_OF_BLOCKS, no_block),
        ],
    )
    return metadata, _Decision(status, fresh)


def _share_found(metadata: Metadata, row: jax.Array, found: Found | None) -> Metadata:
    """Enter the whole blocks found in the tables of their sequences."""
    if found is None:
        return metadata
    is_served = (row < metadata.max_sequences)[:, None]
    blocks = jnp.where(is_served, found.blocks, metadata.num_blocks)
    columns = jnp.arange(blocks.shape[1], dtype=jnp.int32)[None]
    rows = jnp.where(blocks < metadata.num_blocks, row[:, None], metadata.max_sequences)
    tables = metadata.block_tables.at[rows, columns].set(blocks, mode="drop")
    metadata = dataclasses.replace(metadata, block_tables=tables)
    return allocator.add_references(metadata, blocks.reshape(-1))


def _copy_part(
    metadata: Metadata, row: jax.Array, found: Found
) -> tuple[Metadata, BlockCopies]:
    """Have the part of a block that was found copied into the first fresh one."""
    fresh = metadata.block_tables.at[row, found.num_blocks].get(
        mode="fill", fill_value=metadata.num_blocks
    )
    target = jnp.where(found.num_part > 0, fresh, metadata.num_blocks)
    copies = BlockCopies(jnp.minimum(found.part, metadata.num_blocks - 1), target)
    return sharing.copy_tokens(metadata, copies), copies


def _count_queries(
    metadata: Metadata,
    served: jax.Array,
    tokens: jax.Array | None,
    num_cached: jax.Array,
) -> Metadata:
    """Count the prompts of served requests, their tokens, and those found."""
    assert tokens is not None
    asked = (tokens >= 0) & served[:, None]
    sums = {
        Counter.PREFIX_QUERIES: jnp.sum(served, dtype=jnp.int32),
        Counter.PREFIX_TOKENS: jnp.sum(asked, dtype=jnp.int32),
        Counter.PREFIX_HITS: jnp.sum(num_cached, dtype=jnp.int32),
    }
    return counters.add(metadata, sums)
