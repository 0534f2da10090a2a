"""fork, truncate, reorder: share, drop and exchange the tokens of sequences.

Full blocks are shared through the block tables. Both owners would write a partly filled
last block, so it is copied at once: no writable block is shared, and `append` and
`write` need neither branch nor copy. (vLLM copies on write; the early copy keeps the
branch out of the step.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.blocks import sharing
from jkv.metadata import requests, tables
from jkv.metadata.part import (
    Check,
    DemandPlan,
    Exchanging,
    Moves,
    Served,
    apply_plans,
    parts_of,
)
from jkv.metadata.requests import Integers
from jkv.operations import running_sum, while_loop
from jkv.state import Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.status import Status


class Fork(NamedTuple):
    """Result of `fork`, one entry per request."""

    seq_ids: jax.Array  # i32[B], the children, -1 where refused or padding
    status: jax.Array  # i32[B], `Status`


@takes_cache()
def fork(
    cache: Cache, seq_ids: Integers, lengths: Integers | None = None
) -> tuple[Cache, Fork]:
    """Open sequences that share the tokens of existing ones.

    A child has its parent's tokens but not its reserved blocks. It takes one block if
    its last block is partly filled, none otherwise. Outside jit the host checks if a
    block must be copied, and then copies the whole storage: jit and donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int, the parents; one may appear many times, -1 is padding.
      lengths: i32[B] or int, number of the parent's tokens in each child, 0 to the
        parent's context length; None is all. With a sliding window the window of the
        next row must be in the cache, and recurrent-state layers need a state at this
        length, as for `truncate`.

    Returns:
      The new cache and a `Fork`. Status: OK, INVALID_SEQUENCE, INVALID_ARGUMENT (a
      length below 0, above the parent's or below its window), OUT_OF_SEQUENCES or
      OUT_OF_BLOCKS.

    Raises:
      ValueError: if an argument is not integral, has more than one axis, or differs in
        length.

    Example:
      >>> import jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0])
      >>> cache, _ = jkv.append(cache, [0], [6], capacity=6)
      >>> cache, forked = jkv.fork(cache, [0, 0])
      >>> forked.seq_ids.tolist()
      [1, 2]
      >>> [jkv.block_ids(cache, i)[:2].tolist() for i in range(3)]
      [[0, 1], [0, 2], [0, 3]]
    """
    if lengths is None:
        (parents,) = requests.broadcast(seq_ids=seq_ids)
        kept = None
    else:
        parents, kept = requests.broadcast(seq_ids=seq_ids, lengths=lengths)
    metadata, result, moves = _fork(cache.metadata, parents, kept)
    return cache.follow(metadata, moves), result


@jax.jit
def _fork(
    metadata: Metadata, parents: jax.Array, lengths: jax.Array | None
) -> tuple[Metadata, Fork, tuple[Moves, ...]]:
    length = sharing.find_lengths(metadata, parents, lengths)
    looks = [part.share(metadata, parents, length) for part in parts_of(metadata)]
    wrong = jnp.zeros(parents.shape, bool)
    if lengths is not None:
        wrongs = [mask for look in looks for mask in look.wrongs]
        # Lengths outside the parent's were clipped, and differ.
        wrong = requests.any_of([length.tokens != lengths, *wrongs])
    status, served, plans = _judge(metadata, looks, parents, wrong)
    metadata, children = tables.open_rows(metadata, served, length.tokens)
    done = Served(served, children)
    metadata, moves = apply_plans(metadata, plans, done)
    row = done.rows(metadata)
    metadata = metadata.index.inherit(metadata, row, parents, length.tokens)
    parent = jnp.where(served, parents, metadata.max_sequences)
    metadata = requests.mark_parents(metadata, parent)
    metadata = requests.settle(metadata, status, served)
    return metadata, Fork(children, status), moves


def _judge(
    metadata: Metadata, looks: list[Check], parents: jax.Array, wrong: jax.Array
) -> tuple[jax.Array, jax.Array, list[DemandPlan]]:
    """Return statuses, i32[B], a mask of served requests, bool[B], and plans."""
    padding = requests.is_padding(parents)
    live = requests.is_live(metadata, parents)
    eligible = live & ~wrong & ~padding
    plans = [look.judge(eligible) for look in looks]
    no_block = requests.agree([plan.lacks for plan in plans]).no_block
    status = requests.find_status(
        padding,
        [
            (Status.INVALID_SEQUENCE, ~live),
            (Status.INVALID_ARGUMENT, wrong),
            (Status.OUT_OF_SEQUENCES, tables.lacks_row(metadata, eligible, no_block)),
            (Status.OUT_OF_BLOCKS, no_block),
        ],
    )
    return status, eligible & (status == Status.OK), plans


@takes_cache()
def truncate(
    cache: Cache, seq_ids: Integers, lengths: Integers
) -> tuple[Cache, jax.Array]:
    """Drop tokens from the end of sequences, and all blocks past the new length.

    Reserved blocks are released too. If the new last block is partly filled and shared,
    the sequence gets a copy, which takes a block that is free before the call. An
    unshared one is kept, and its entry in the prefix index past the cut is removed.
    Outside jit the host checks if a block must be copied, and then copies the whole
    storage: jit and donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding.
      lengths: i32[B] or int, tokens to keep, 0 to the context length. With a sliding
        window the window of the next row must be cached: the last `append` can always
        be undone, and 0 is always allowed; a length among the first `num_sink_tokens`
        is too short once blocks after the sinks are released. Recurrent-state layers
        have a state at 0, at the current length, at the pending tokens (`append`), and
        at snapshots (`snapshots`).

    Returns:
      The new cache and i32[B] of `Status`: OK, INVALID_SEQUENCE, INVALID_ARGUMENT (a
      length below 0, above the current one, below the window or without a state) or
      OUT_OF_BLOCKS.

    Raises:
      ValueError: if an argument is not integral, has more than one axis, or differs in
        length.

    Example:
      >>> import jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0])
      >>> cache, _ = jkv.append(cache, [0], [10], capacity=10)
      >>> cache, status = jkv.truncate(cache, [0], [5])
      >>> int(cache.metadata.context_lengths[0]), int(jkv.num_free_blocks(cache))
      (5, 6)
    """
    seq_ids, lengths = requests.broadcast(seq_ids=seq_ids, lengths=lengths)
    metadata, status, moves = _truncate(cache.metadata, seq_ids, lengths)
    return cache.follow(metadata, moves), status


@jax.jit
def _truncate(
    metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
) -> tuple[Metadata, jax.Array, tuple[Moves, ...]]:
    padding = requests.is_padding(seq_ids)
    before = metadata.sequences.read(seq_ids)
    live = requests.is_open(metadata, seq_ids, before)
    live &= requests.is_first_mention(metadata, seq_ids)
    outside = (lengths < 0) | (lengths > before.context_length)
    looks = [part.cut(metadata, seq_ids, lengths) for part in parts_of(metadata)]
    wrong = requests.any_of([outside, *(m for look in looks for m in look.wrongs)])
    causes = [(Status.INVALID_SEQUENCE, ~live), (Status.INVALID_ARGUMENT, wrong)]
    status = requests.find_status(padding, causes)
    eligible = (status == Status.OK) & ~padding
    lengths = jnp.where(eligible, lengths, 0)
    plans = [look.judge(eligible) for look in looks]
    no_block = requests.agree([plan.lacks for plan in plans]).no_block
    status = jnp.where(no_block, jnp.int32(Status.OUT_OF_BLOCKS), status)
    served = eligible & ~no_block

    done = Served(served, seq_ids)
    metadata, moves = apply_plans(metadata, plans, done)
    row = done.rows(metadata)
    metadata = metadata.index.cut(metadata, row, lengths)
    metadata = requests.mark_used(metadata, row, before, lengths)
    return requests.settle(metadata, status, served), status, moves


@takes_cache()
def reorder(
    cache: Cache, seq_ids: Integers, parents: Integers
) -> tuple[Cache, jax.Array]:
    """Replace each sequence by its parent as before the call, for beam search.

    All requests apply at once: sequences may swap. A sequence that is its own parent is
    unchanged, including reservation, last use and prefix, and needs no block. Others
    release their blocks and share the parent's full ones, with a copy of a partly
    filled last block. Blocks released in the call can be taken in the same call.
    Outside jit the host checks if a block must be copied, and then copies the whole
    storage: jit and donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int, sequences to replace; -1 is padding.
      parents: i32[B] or int, open sequences, which may repeat.

    Returns:
      The new cache and i32[B] of `Status`: OK, INVALID_SEQUENCE (either id) or
      OUT_OF_BLOCKS. If not all fit, all requests without need of blocks are served, and
      the longest prefix of the others that fits together.

    Raises:
      ValueError: if an argument is not integral, has more than one axis, or differs in
        length.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(num_blocks=4, max_sequences=2,
      ...     max_context_length=8)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0, 0])
      >>> cache, _ = jkv.append(cache, [0, 1], [5, 5], capacity=10)
      >>> cache, status = jkv.reorder(cache, [0, 1], [1, 1])
      >>> [jkv.block_ids(cache, i).tolist() for i in (0, 1)]
      [[2, 1], [2, 3]]
    """
    seq_ids, parents = requests.broadcast(seq_ids=seq_ids, parents=parents)
    metadata, status, moves = _reorder(cache.metadata, seq_ids, parents)
    return cache.follow(metadata, moves), status


@jax.jit
def _reorder(
    metadata: Metadata, seq_ids: jax.Array, parents: jax.Array
) -> tuple[Metadata, jax.Array, tuple[Moves, ...]]:
    padding = requests.is_padding(seq_ids)
    before = metadata.sequences.read(seq_ids)
    live = requests.is_open(metadata, seq_ids, before)
    live &= requests.is_first_mention(metadata, seq_ids)
    live &= requests.is_live(metadata, parents)
    changes = live & ~padding & (seq_ids != parents)
    length = sharing.find_lengths(metadata, parents)
    plans = [
        part.exchange(metadata, seq_ids, parents, length) for part in parts_of(metadata)
    ]
    no_block = _lacks_blocks(metadata, plans, changes, changes & (length.tail > 0))
    status = requests.find_status(
        padding, [(Status.INVALID_SEQUENCE, ~live), (Status.OUT_OF_BLOCKS, no_block)]
    )
    served = changes & ~no_block
    done = Served(served, seq_ids)
    metadata, moves = apply_plans(metadata, plans, done)
    row = done.rows(metadata)
    metadata = metadata.index.inherit(metadata, row, parents, length.tokens, True)
    metadata = requests.mark_used(metadata, row, before, length.tokens)
    return requests.settle(metadata, status, served), status, moves


def _lacks_blocks(
    metadata: Metadata, plans: list[Exchanging], changes: jax.Array, needs: jax.Array
) -> jax.Array:
    """Return requests without a free block for their tail in some pool, bool[B].

    A changing request needs one block in each pool, or none, `needs`. Usually the free
    blocks suffice and the loop has no trips; otherwise it tries fewer and fewer
    requests, counting the blocks that they would release.
    """
    parts = parts_of(metadata)
    if not any(part.num_free(metadata) for part in parts):  # no pools
        return jnp.zeros_like(needs)
    rank = running_sum(needs.astype(jnp.int32))
    wanted = rank[-1] if rank.shape[0] else jnp.int32(0)

    def reaches(metadata: Metadata, num: jax.Array) -> jax.Array:
        counts = [count for part in parts for count in part.num_free(metadata)]
        return ~requests.any_of([num > count for count in counts])

    def try_fewer(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        num_served, _ = state
        served, tried = changes & ~(needs & (rank > num_served)), metadata
        for plan in plans:
            tried = plan.release(tried, served)
        fits = reaches(tried, num_served)
        return jnp.where(fits, num_served, num_served - 1), fits

    num_served, _ = while_loop(
        lambda state: ~state[1], try_fewer, (wanted, reaches(metadata, wanted))
    )
    return needs & (rank > num_served)
