"""truncate: tokens dropped from the end of sequences."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jkv.metadata import counters, requests, sharing, tables
from jkv.metadata.requests import Integers
from jkv.metadata.states import Cut, StateMoves, find_cut
from jkv.metadata.tails import BlockCopies
from jkv.state import BlockGroup, Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.status import Status
from jkv.storage.copies import with_copies
from jkv.storage.state_copies import with_moves


@takes_cache()
def truncate(
    cache: Cache, seq_ids: Integers, lengths: Integers
) -> tuple[Cache, jax.Array]:
    """Drop tokens from the end of sequences, and every block past the new length.

    Reserved blocks go too. If the new last block is partly filled and shared, the
    sequence gets a copy of its own, which takes a block free before the call. One that
    no other sequence shares is kept, and what the prefix index knew past the cut is
    forgotten.
    Outside jit this looks on the host whether a block must be copied, and copies the
    storage if so: jit and donate.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding.
      lengths: i32[B] or int, tokens to keep, 0 to the context length. With a sliding
        window, what the row after them sees must be kept still: the last `append` can
        always be undone, and a sequence can begin anew from 0. A length among the
        first `num_sink_tokens` is too short, once blocks behind the sinks are given
        back, though the sinks themselves are kept. Layers with a state have it at 0, at
        the present length, at those of the tokens that are pending (`append`), and
        where a snapshot of the text is (`snapshots`).

    Returns:
      The new cache and i32[B] of `Status`: OK, INVALID_SEQUENCE, INVALID_ARGUMENT (a
      length below 0, above the current one, below the window or where no state is) or
      OUT_OF_BLOCKS.

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
    metadata, status, copies, moves = _truncate(cache.metadata, seq_ids, lengths)
    return with_moves(with_copies(cache, metadata, copies), moves), status


@jax.jit
def _truncate(
    metadata: Metadata, seq_ids: jax.Array, lengths: jax.Array
) -> tuple[Metadata, jax.Array, tuple[BlockCopies, ...], StateMoves | None]:
    padding = requests.is_padding(seq_ids)
    live = requests.is_live_once(metadata, seq_ids)
    length = metadata.context_lengths.at[seq_ids].get(mode="clip")
    cut = find_cut(metadata, seq_ids, lengths)
    wrong = requests.any_of(
        [
            *([] if cut is None else [cut.is_wrong]),
            (lengths < 0) | (lengths > length),
            *(
                group.window.cuts_off(seq_ids, lengths, group.block_size)
                for group in metadata.groups
            ),
        ]
    )
    causes = [(Status.INVALID_SEQUENCE, ~live), (Status.INVALID_ARGUMENT, wrong)]
    status = requests.find_status(padding, causes)
    eligible = (status == Status.OK) & ~padding

    lengths = jnp.where(eligible, lengths, 0)
    column, tail = tables.locate(lengths, metadata.block_size)
    has_tail = eligible & (tail > 0)
    tails = [_find_tail(each, seq_ids, column, has_tail) for each in metadata.groups]
    needs = tuple(each.is_shared.astype(jnp.int32) for each in tails)
    no_block = requests.agree(metadata.groups, needs).no_block
    status = jnp.where(no_block, jnp.int32(Status.OUT_OF_BLOCKS), status)
    served = eligible & ~no_block

    row = jnp.where(served, seq_ids, metadata.max_sequences)
    copies = []
    for number, each in enumerate(tails):
        metadata, copied = _cut(metadata, number, each, seq_ids, lengths, served)
        copies.append(copied)
    metadata, moves = _cut_states(metadata, row, lengths, cut)
    of_all = metadata.sequences
    shortened = of_all.context_lengths.at[row].set(lengths, mode="drop")
    of_all = dataclasses.replace(of_all, context_lengths=shortened)
    metadata = dataclasses.replace(metadata, sequences=of_all)
    metadata = metadata.index.cut(metadata, row, lengths)
    of_all = counters.mark_used(metadata.sequences, row)
    of_all = counters.settle(of_all, status, served)
    metadata = dataclasses.replace(metadata, sequences=of_all)
    return metadata, status, tuple(copies), moves


def _cut_states(
    metadata: Metadata, row: jax.Array, lengths: jax.Array, cut: Cut | None
) -> tuple[Metadata, StateMoves | None]:
    """Let rows, i32[B], have the states at lengths, i32[B]; a row of S is dropped."""
    if cut is None:
        return metadata, None
    metadata = metadata.with_pending(row, cut.num_pending)
    # Where the state stands before the cut already, only tokens are pending no more.
    changes, place, no_row = lengths == 0, None, metadata.max_sequences
    if cut.snapshot is not None:
        found = cut.snapshot.only(row < no_row)
        metadata = metadata.index.use(metadata, found)
        changes, place = changes | (found.place < found.none), found.place
    target = jnp.where(changes, row, no_row)
    base = jnp.where(lengths == 0, 0, lengths - cut.num_pending)
    return metadata, StateMoves(target, base, place=place)


class _Tail(NamedTuple):
    """The block of each of B requests that is cut through, in one group."""

    column: jax.Array  # i32[B], of the block tables
    is_cut: jax.Array  # bool[B], whether there is such a block
    block: jax.Array  # i32[B]
    is_shared: jax.Array  # bool[B], whether it is cut and others have it, too


def _find_tail(
    group: BlockGroup, seq_ids: jax.Array, column: jax.Array, is_cut: jax.Array
) -> _Tail:
    block = group.block_tables.at[seq_ids, column].get(mode="clip")
    has_others = group.reference_counts.at[block].get(mode="clip") > 1
    return _Tail(column, is_cut, block, is_cut & has_others)


def _cut(
    metadata: Metadata,
    number: int,
    tail: _Tail,
    seq_ids: jax.Array,
    lengths: jax.Array,
    served: jax.Array,
) -> tuple[Metadata, BlockCopies]:
    """Cut served sequences, bool[B], back to lengths, i32[B], in one group."""
    group = metadata.groups[number]
    copied = tail.is_shared & served
    kept = tables.num_blocks_for(lengths, group.block_size)
    mapped = group.num_mapped_blocks.at[seq_ids].get(mode="clip")
    group = tables.release_blocks(
        group,
        seq_ids,
        kept - copied.astype(jnp.int32),
        jnp.where(served, mapped, 0),
    )
    metadata = metadata.with_group(number, group)
    metadata, copies = sharing.take_tails(
        metadata, number, copied, seq_ids, tail.column, tail.block
    )
    rewritten = served & tail.is_cut & ~copied
    metadata = metadata.index.forget_rewritten(
        metadata, number, jnp.where(rewritten, tail.block, group.num_blocks)
    )
    group = metadata.groups[number]
    row = jnp.where(served, seq_ids, metadata.max_sequences)
    emptied = jnp.where(lengths == 0, row, metadata.max_sequences)
    group = dataclasses.replace(
        group,
        num_mapped_blocks=group.num_mapped_blocks.at[row].set(kept, mode="drop"),
        window=group.window.with_gaps(emptied, 0),
    )
    return metadata.with_group(number, group), copies
