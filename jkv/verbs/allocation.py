"""allocate and free: open sequences with reserved blocks, and close them.

Block ids leave at the head of a FIFO ring and return at its tail, a sequence's last
block first, so the pool allocates blocks in LRU order. A request is served completely
or not at all.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import as_index
from jkv.metadata import requests, tables
from jkv.metadata.part import (
    Moves,
    Opening,
    Served,
    apply_plans,
    close_sequences,
    parts_of,
)
from jkv.metadata.requests import Blocks, IntegerRows, Integers
from jkv.metadata.ring import Keep
from jkv.state import NO_SEQUENCE, Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.state.index import Found
from jkv.status import Status, UsageError


class Allocation(NamedTuple):
    """Result of `allocate`, one entry per request."""

    seq_ids: jax.Array  # i32[B], the opened sequences, -1 where refused or padding
    status: jax.Array  # i32[B], `Status`
    num_cached: jax.Array  # i32[B], cached prompt tokens, which need no computation


@takes_cache()
def allocate(
    cache: Cache,
    num_tokens: Integers,
    *,
    tokens: IntegerRows | None = None,
    salts: Integers = 0,
    keep_free: Blocks = 0,
    recompute_last: bool = False,
) -> tuple[Cache, Allocation]:
    """Open B sequences, each with blocks reserved for `num_tokens` tokens.

    A new sequence has context length 0; the reservation only guarantees how far
    `append` can grow it without taking blocks. In layers with a sliding window it is
    limited to the blocks that a sequence uses at one time. With prefix caching, a
    prompt that shares a prefix with cached sequences starts with it: whole blocks are
    shared, and the common part of the next block is copied. Outside jit the host checks
    if a block must be copied, and then copies the whole storage: jit and donate.

    Args:
      cache: the cache.
      num_tokens: i32[B] or int; 0 reserves nothing, -1 is padding. The cached prefix
        counts towards it; a longer prefix is kept whole, and nothing is reserved beyond
        it.
      tokens: i32[B, P], the prompts, padded with -1, or a list of token ids for each,
        matched against the prefix index. Ignored without prefix caching, so a loop may
        always pass them.
      salts: i32[B] or int, cache salts; sequences with different salts share no blocks
        (tenants, adapters, versions of the weights). Default 0.
      keep_free: i32[] or int, number of blocks to leave free: requests that would need
        them are OUT_OF_BLOCKS. A scheduler passes its outstanding reservations. A tuple
        has one number per group of layers; a single number applies to all.
      recompute_last: static; do not count the last cached token of each prompt, so that
        the caller computes it again, as for its hidden state. Its keys stay readable in
        its slot. Ignored with recurrent states, which cannot be cut by one token.

    Returns:
      The new cache and an `Allocation`. Status: OK, INVALID_ARGUMENT (below -1),
      CONTEXT_FULL (above `max_context_length`), OUT_OF_SEQUENCES or OUT_OF_BLOCKS.

    Raises:
      ValueError: if an argument has the wrong type or shape.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(num_blocks=4, max_sequences=8)
      >>> cache, opened = jkv.allocate(jkv.init(config), [9, 5, 0])
      >>> opened.seq_ids.tolist(), opened.status.tolist()
      ([0, -1, 1], [0, 1, 0])
    """
    prompts = None if tokens is None else requests.as_prompts(tokens)
    num_prompts = None if prompts is None else prompts.shape[0]
    counts, salts = requests.broadcast(
        num_prompts, num_tokens=num_tokens, salts=requests.as_salts("salts", salts)
    )
    kept = jax.tree.map(as_index, keep_free)
    given = cache.metadata, counts, prompts, salts, kept
    metadata, result, moves = _allocate(*given, recompute_last=recompute_last)
    return cache.follow(metadata, moves), result


@takes_cache()
def can_allocate(cache: Cache, num_tokens: Integers) -> jax.Array:
    """Return True for requests that `allocate` would serve now.

    Args:
      cache: the cache.
      num_tokens: i32[B] or int, as for `allocate`.

    Returns:
      bool[B]; padding counts as served.

    Raises:
      ValueError: if `num_tokens` is not integral or has more than one axis.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(num_blocks=4, max_sequences=8)
      >>> jkv.can_allocate(jkv.init(config), [16, 1]).tolist()
      [True, False]
    """
    (num_tokens,) = requests.broadcast(num_tokens=num_tokens)
    return _can_allocate(cache.metadata, num_tokens)


@takes_cache()
def free(
    cache: Cache,
    seq_ids: Integers,
    *,
    keep: Integers = 0,
    keep_until: Integers | None = None,
) -> tuple[Cache, jax.Array]:
    """Close sequences and return their unshared blocks to the pool.

    Blocks in the prefix index stay cached until the pool evicts them. With
    `keep_classes`, blocks of lower classes (retention priorities) are evicted first, in
    LRU order within a class. A block has the highest class of the sequences freed with
    it; it keeps the class through prefix cache hits, until it is evicted, forgotten, or
    `demote`d.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding.
      keep: i32[B] or int, class of the cached blocks, below `keep_classes`.
      keep_until: u32[B] or int, tick before which `demote` leaves the class; None is
        this call's tick by `jkv.clock`. A block has the latest of its sequences.

    Returns:
      The new cache and i32[B] of `Status`: OK, INVALID_SEQUENCE for an id that is not
      open or is repeated in this call, or INVALID_ARGUMENT for a class outside
      0..keep_classes-1.

    Raises:
      ValueError: if an argument is not integral or has more than one axis.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=4, max_sequences=2,
      ...     max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [64])
      >>> cache, status = jkv.free(cache, [0, 0, -1])
      >>> status.tolist(), int(jkv.num_free_blocks(cache))
      ([0, 5, 0], 4)
    """
    if keep_until is not None:
        keep_until = _as_time(keep_until)
    named: dict[str, Integers] = {}
    # The only class, given as an int, needs no array.
    if cache.metadata.num_classes > 1 or not isinstance(keep, int) or keep:
        named["keep"] = keep
        if keep_until is not None:
            named["keep_until"] = keep_until
    seq_ids, *of_class = requests.broadcast(seq_ids=seq_ids, **named)
    metadata, status = _free(cache.metadata, seq_ids, *of_class)
    return cache.with_metadata(metadata), status


def _as_time(given: Integers) -> Integers:
    """Return ticks of `jkv.clock` for `broadcast`; refuse other numbers."""
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(given)):
        times = np.asarray(given)
        is_integer = np.issubdtype(times.dtype, np.integer)
        if is_integer and not ((times >= 0) & (times < 2**32)).all():
            raise UsageError(
                f"keep_until must be in 0..{2**32 - 1}, a tick of jkv.clock, got "
                f"{given!r:.60}"
            )
    return requests.as_salts("keep_until", given)


@functools.partial(jax.jit, static_argnames="recompute_last")
def _allocate(
    metadata: Metadata,
    num_tokens: jax.Array,
    tokens: jax.Array | None,
    salts: jax.Array,
    keep_free: Blocks,
    *,
    recompute_last: bool,
) -> tuple[Metadata, Allocation, tuple[Moves, ...]]:
    found = metadata.index.find(metadata, tokens, salts, recompute_last)
    status, served, plans = _judge_openings(metadata, num_tokens, found, keep_free)
    num_cached = jnp.where(served, found.num_tokens(metadata.block_size), 0)
    metadata, seq_ids = tables.open_rows(metadata, served, num_cached)
    row = jnp.where(served, seq_ids, metadata.max_sequences)
    # Blocks found are pinned before any block is taken.
    for plan in plans:
        metadata = plan.pin(metadata, row)
    done = Served(served, seq_ids)
    metadata, moves = apply_plans(metadata, plans, done)
    metadata = metadata.index.begin(metadata, row, salts, num_cached, tokens)
    metadata = requests.settle(metadata, status, served)
    return metadata, Allocation(seq_ids, status, num_cached), moves


@jax.jit
def _can_allocate(metadata: Metadata, num_tokens: jax.Array) -> jax.Array:
    found = metadata.index.find(metadata, None, num_tokens)
    status, _, _ = _judge_openings(metadata, num_tokens, found)
    return status == Status.OK


@jax.jit
def _free(
    metadata: Metadata,
    seq_ids: jax.Array,
    classes: jax.Array | None = None,
    until: jax.Array | None = None,
) -> tuple[Metadata, jax.Array]:
    padding = requests.is_padding(seq_ids)
    closable = requests.is_live_once(metadata, seq_ids)
    causes = [(Status.INVALID_SEQUENCE, ~closable)]
    if classes is not None:
        wrong = (classes < 0) | (classes >= metadata.num_classes)
        causes.append((Status.INVALID_ARGUMENT, wrong))
        closable &= ~wrong
        times = jnp.broadcast_to(metadata.now + jnp.uint32(1), classes.shape)
        if until is not None:
            times = jax.lax.bitcast_convert_type(until, jnp.uint32)
        keep = Keep(classes, times)
        for number in metadata.block_numbers:
            metadata = tables.keep_blocks(metadata, number, seq_ids, closable, keep)
    status = requests.find_status(padding, causes)
    metadata = close_sequences(metadata, seq_ids, closable)
    return requests.settle(metadata, status, closable), status


def _judge_openings(
    metadata: Metadata, num_tokens: jax.Array, found: Found, keep_free: Blocks = 0
) -> tuple[jax.Array, jax.Array, list[Opening]]:
    """Check requests, i32[B], against the free blocks before the call less `keep_free`.

    Return statuses, i32[B], a mask of served requests, bool[B], and plans.
    """
    padding = num_tokens == NO_SEQUENCE
    negative = num_tokens < 0
    too_long = num_tokens > metadata.max_context_length
    eligible = ~(negative | too_long)
    plans = [
        part.open(metadata, found, num_tokens, eligible) for part in parts_of(metadata)
    ]
    no_block = requests.agree([plan.lacks for plan in plans], keep_free).no_block
    no_row = tables.lacks_row(metadata, eligible, no_block)
    status = requests.find_status(
        padding,
        [
            (Status.INVALID_ARGUMENT, negative),
            (Status.CONTEXT_FULL, too_long),
            (Status.OUT_OF_SEQUENCES, no_row),
            (Status.OUT_OF_BLOCKS, no_block),
        ],
    )
    served = (status == Status.OK) & ~padding
    return status, served, plans
