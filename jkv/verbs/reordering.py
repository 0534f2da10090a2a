"""reorder: the step of a beam search."""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.metadata import counters, requests, sharing, tables
from jkv.metadata.requests import Integers
from jkv.metadata.states import StateMoves, find_cut
from jkv.metadata.tails import BlockCopies
from jkv.metadata.xla_cpu import running_sum
from jkv.sharding.loops import while_loop
from jkv.state import BlockGroup, Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.status import Status
from jkv.storage.copies import with_copies
from jkv.storage.state_copies import with_moves


@takes_cache()
def reorder(
    cache: Cache, seq_ids: Integers, parents: Integers
) -> tuple[Cache, jax.Array]:
    """Let sequence i continue from what its parent was before the call (beam search).

    All requests happen at once: sequences may swap. One that is its own parent stays as
    it is, reservation, last use and prefix included, and needs no block; any other
    gives up all its blocks and shares the parent's full ones, with a copy of a partly
    filled last block. Blocks that the sequences of the call give up can be taken in the
    same call. Outside jit this looks on the host whether a block must be copied, and
    copies the storage if so: jit and donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int, sequences to change; -1 is padding.
      parents: i32[B] or int, open sequences, in the call or not; may repeat.

    Returns:
      The new cache and i32[B] of `Status`: OK, INVALID_SEQUENCE (either id) or
      OUT_OF_BLOCKS. If not all fit, the requests that need no block and the longest run
      of the others, in order, that fits together are served.

    Raises:
      ValueError: for arguments that are no integers, have more than one axis, or differ
        in length.

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
    metadata, status, copies, moves_of_states = _reorder(
        cache.metadata, seq_ids, parents
    )
    return with_moves(with_copies(cache, metadata, copies), moves_of_states), status


@jax.jit
def _reorder(
    metadata: Metadata, seq_ids: jax.Array, parents: jax.Array
) -> tuple[Metadata, jax.Array, tuple[BlockCopies, ...], StateMoves | None]:
    padding = requests.is_padding(seq_ids)
    live = requests.is_live_once(metadata, seq_ids)
    live &= requests.is_live(metadata, parents)
    moves = live & ~padding & (seq_ids != parents)
    length = sharing.find_lengths(metadata, parents)
    pasts = tuple(
        sharing.find_past(group, parents, length) for group in metadata.groups
    )
    needs = moves & (length.tail > 0)
    no_block = _lacks_blocks(metadata, seq_ids, pasts, length, moves, needs)
    status = requests.find_status(
        padding, [(Status.INVALID_SEQUENCE, ~live), (Status.OUT_OF_BLOCKS, no_block)]
    )
    served = moves & ~no_block
    before, copies = metadata, []
    for number, past in enumerate(pasts):
        group = _exchange(metadata.groups[number], seq_ids, past, length, served)
        metadata, copied = sharing.adopt(
            metadata.with_group(number, group), number, past, length, served, seq_ids
        )
        copies.append(copied)
    row = jnp.where(served, seq_ids, metadata.max_sequences)
    metadata, moves_of_states = sharing.take_states(
        metadata,
        row,
        parents,
        length.tokens,
        find_cut(before, parents, length.tokens),
        is_exchange=True,
    )
    metadata = metadata.index.inherit(metadata, row, parents, length.tokens, True)
    of_all = metadata.sequences
    lengths_now = of_all.context_lengths.at[row].set(length.tokens, mode="drop")
    of_all = dataclasses.replace(of_all, context_lengths=lengths_now)
    of_all = counters.settle(counters.mark_used(of_all, row), status, served)
    metadata = dataclasses.replace(metadata, sequences=of_all)
    return metadata, status, tuple(copies), moves_of_states


def _lacks_blocks(
    metadata: Metadata,
    seq_ids: jax.Array,
    pasts: tuple[sharing.Past, ...],
    length: sharing.Lengths,
    moves: jax.Array,
    needs: jax.Array,
) -> jax.Array:
    """Return which requests find no block for their tail in some group, bool[B].

    Usually the free blocks suffice and the loop makes no trip. Else ever fewer requests
    are tried, with what they would give up.

    Args:
      metadata: the state before the call.
      seq_ids: i32[B].
      pasts: of the parents, in each group.
      length: of the pasts.
      moves: bool[B], requests that change something.
      needs: bool[B], those of them that need a block in each group.
    """
    if not metadata.groups:
        return jnp.zeros_like(needs)
    rank = running_sum(needs.astype(jnp.int32))
    wanted = rank[-1] if rank.shape[0] else jnp.int32(0)

    def reaches(groups: tuple[BlockGroup, ...], num: jax.Array) -> jax.Array:
        return ~requests.any_of([num > each.free_blocks.count for each in groups])

    def try_fewer(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        num_served, _ = state
        served = moves & ~(needs & (rank > num_served))
        tried = tuple(
            _exchange(group, seq_ids, past, length, served)
            for group, past in zip(metadata.groups, pasts, strict=True)
        )
        fits = reaches(tried, num_served)
        return jnp.where(fits, num_served, num_served - 1), fits

    num_served, _ = while_loop(
        lambda state: ~state[1],
        try_fewer,
        (wanted, reaches(metadata.groups, wanted)),
    )
    return needs & (rank > num_served)


def _exchange(
    group: BlockGroup,
    seq_ids: jax.Array,
    past: sharing.Past,
    length: sharing.Lengths,
    served: jax.Array,
) -> BlockGroup:
    """Count the new owners of full blocks, and release what the sequences had.

    In this order a block that only changes hands stays live.
    """
    group = sharing.count_owners(group, past, length, served)
    mapped = group.num_mapped_blocks.at[seq_ids].get(mode="clip")
    gap = group.window.gaps_of(seq_ids)
    return tables.release_kept(group, seq_ids, jnp.where(served, mapped, 0), gap)
