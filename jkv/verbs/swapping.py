"""Out and back: sequences leave for host memory and return, to this cache or another.

What crosses is the blocks that hold tokens, each once however many of the sequences
share it (`jkv.storage.contents`).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata import allocator, counters, gaps, requests, ring, tables
from jkv.metadata.prefixes import holes, sequences
from jkv.metadata.requests import Integers
from jkv.state import Cache, Metadata
from jkv.state.entry import for_host
from jkv.status import Status
from jkv.storage import contents
from jkv.storage.swapped import Swapped, check_same_kind, copy_out
from jkv.verbs.allocation import free


class SwapIn(NamedTuple):
    """What `swap_in` answers, one entry per sequence, in the order swapped out."""

    seq_ids: jax.Array  # i32[B], the ids they have now, all -1 if refused
    status: jax.Array  # i32[B], `Status`, the same for all


@for_host
def swap_out(cache: Cache, seq_ids: Integers) -> tuple[Cache, Swapped]:
    """Move sequences to the host; they are freed here. For the host, outside jit.

    Other sequences may share their blocks and stay. The blocks with tokens are gathered
    on the device, which takes that much memory there until they have crossed.

    Recorded tokens and domains of the prefix index go along. What a sequence had made
    visible in the index stays behind as cached blocks, for others to find as long as
    the pool can spare them.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding and leaves no trace in the result.

    Returns:
      The new cache, as `free` leaves it, and the sequences.

    Raises:
      InvalidSequence: for an id that is not open or is named twice; nothing happened.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [64])
      >>> cache, swapped = jkv.swap_out(cache, opened.seq_ids)
      >>> int(jkv.num_free_blocks(cache)), swapped.num_sequences
      (4, 1)
    """
    swapped = copy_out(cache, seq_ids)
    cache, _ = free(cache, seq_ids)
    return cache, swapped


@for_host
def swap_in(
    cache: Cache, swapped: Swapped, *, donate: bool = False
) -> tuple[Cache, SwapIn]:
    """Open swapped sequences again, all or none. For the host, outside jit.

    They may return to any cache with the same layers, heads, sizes of head and block,
    and dtype. Blocks that they shared among each other they share again; what they
    shared with sequences that stayed, they now have for themselves. Tokens that were
    not recorded read as -1 in a cache that records them.

    Reserved blocks are reserved again: a reservation promises that `append` will not be
    refused, also after a time elsewhere (`truncate` to the current length gives it up).
    The sequences are stamped by this cache's clock, as by `allocate`, and keep the
    number of their uses. One that had begun to make blocks visible to the prefix index
    makes no more of them visible.

    Args:
      cache: the cache.
      swapped: what `swap_out` returned; it stays valid.
      donate: write in place of the old cache's storage, which is then gone, instead of
        in a copy. Without it the device must hold the storage twice for a moment.

    Returns:
      The new cache and a `SwapIn`. Status: OK, CONTEXT_FULL (a sequence exceeds this
      cache's `max_context_length`), OUT_OF_SEQUENCES or OUT_OF_BLOCKS.

    Raises:
      ValueError: for sequences from a cache of another shape or dtype, or that have
        given back what this cache's window sees.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [20, 64])
      >>> opened.seq_ids.tolist()
      [0, -1]
      >>> cache, swapped = jkv.swap_out(cache, 0)
      >>> cache, opened = jkv.allocate(cache, 64)
      >>> cache, back = jkv.swap_in(cache, swapped)
      >>> back.status.tolist() == [jkv.Status.OUT_OF_BLOCKS]
      True
      >>> cache, status = jkv.free(cache, opened.seq_ids)
      >>> cache, back = jkv.swap_in(cache, swapped)
      >>> back.seq_ids.tolist()
      [0]
    """
    check_same_kind(cache, swapped)
    if swapped.num_sequences == 0:
        none = jnp.zeros((0,), jnp.int32)
        return cache, SwapIn(none, none)
    metadata, result, rows = _open(cache.metadata, _Entering.of(swapped, cache))
    if int(result.status[0]) != Status.OK:
        return cache.with_metadata(metadata), result

    # The new tables say where each of the swapped blocks is now.
    blocks = np.full(swapped.num_blocks + 1, cache.num_blocks, np.int32)
    columns = min(swapped.block_tables.shape[1], cache.max_blocks_per_sequence)
    blocks[swapped.block_tables[:, :columns]] = np.asarray(rows)[:, :columns]
    cache = cache.with_metadata(metadata)
    filled = blocks[: swapped.num_filled_blocks]
    return contents.put(cache, filled, swapped.contents, donate=donate), result


def judge_swap_in(cache: Cache, swapped: Swapped) -> int:
    """Return the status that `swap_in` would answer, and change nothing.

    Raises:
      ValueError: as `swap_in`.
    """
    check_same_kind(cache, swapped)
    if swapped.num_sequences == 0:
        return Status.OK
    _, result, _ = _open(cache.metadata, _Entering.of(swapped, cache))
    return int(result.status[0])


class _Entering(NamedTuple):
    """Sequences on their way in, as `_open` needs them; all arrays on the host."""

    block_tables: Any  # i32[B, M] in swapped numbers, M of the cache they enter
    is_first: Any  # bool[B, M], entries that name a block for the first time
    context_lengths: Any  # i32[B]
    num_uses: Any  # u32[B]
    committed: Any  # i32[B]
    salts: Any  # i32[B]
    num_given_back: Any  # i32[B], columns without a block between those with one
    num_blocks: Any  # i32[], blocks to be taken; the tables' "not mapped"
    too_long: Any  # bool[], whether one does not fit the block tables

    @classmethod
    def of(cls, swapped: Swapped, cache: Cache) -> "_Entering":
        """Fit the tables of swapped sequences to those of a cache."""
        columns = cache.max_blocks_per_sequence
        tables = swapped.block_tables[:, :columns]
        padding = ((0, 0), (0, columns - tables.shape[1]))
        tables = np.pad(tables, padding, constant_values=swapped.num_blocks)
        is_first = np.zeros(tables.size, bool)
        is_first[np.unique(tables, return_index=True)[1]] = True
        cut_off = swapped.block_tables[:, columns:] < swapped.num_blocks
        lengths = swapped.context_lengths
        salts, gap = swapped.salts, swapped.num_given_back
        return cls(
            block_tables=tables,
            is_first=is_first.reshape(tables.shape),
            context_lengths=lengths,
            num_uses=swapped.num_uses,
            committed=_committed_on_return(swapped),
            salts=np.zeros_like(lengths) if salts is None else salts,
            num_given_back=np.zeros_like(lengths) if gap is None else gap,
            num_blocks=np.int32(swapped.num_blocks),
            too_long=np.any(cut_off) | np.any(lengths > cache.max_context_length),
        )


def _committed_on_return(swapped: Swapped) -> np.ndarray:
    """Return `PrefixIndex.committed` of the sequences in the cache they enter, i32[B].

    Their blocks are not in its index. They may not be replaced by equal ones that are,
    as the last bits of the contents can differ, and no block may be visible before its
    parent. So a sequence that had begun to make blocks visible is done with that (-1).
    """
    if swapped.committed is None:
        begun = swapped.context_lengths > 0
    else:
        begun = swapped.committed != 0
    return np.where(begun, np.int32(-1), np.int32(0))


@jax.jit
def _open(
    metadata: Metadata, entering: _Entering
) -> tuple[Metadata, SwapIn, jax.Array]:
    """Open sequences with blocks for all, or refuse them all.

    Returns:
      The metadata, the answer, and i32[B, M], the sequences' new block tables.
    """
    num_rows = entering.context_lengths.shape[0]
    num_blocks = entering.num_blocks
    causes = [
        (Status.CONTEXT_FULL, entering.too_long),
        (Status.OUT_OF_SEQUENCES, metadata.free_sequences.count < num_rows),
        (Status.OUT_OF_BLOCKS, metadata.free_blocks.count < num_blocks),
    ]
    cause = requests.find_status(jnp.bool_(False), causes)
    status = jnp.full((num_rows,), cause)
    served = status == Status.OK
    metadata, seq_ids = tables.open_rows(metadata, served)
    row = jnp.where(served, seq_ids, metadata.max_sequences)

    # The blocks are numbered in the order in which they leave the pool.
    taken = jnp.where(cause == Status.OK, num_blocks, 0)
    metadata = holes.expose(metadata, taken)
    mapped = served[:, None] & (entering.block_tables < num_blocks)
    block = ring.peek(metadata.free_blocks, entering.block_tables)
    block = jnp.where(mapped, block, metadata.num_blocks)
    first = jnp.where(entering.is_first, block, metadata.num_blocks)
    metadata = allocator.mark_taken(metadata, first.reshape(-1))
    again = jnp.where(entering.is_first, metadata.num_blocks, block)
    counts = metadata.reference_counts.at[again].add(1, mode="drop")
    num_mapped = jnp.sum(mapped, axis=1, dtype=jnp.int32)
    if metadata.window is not None:
        num_mapped += entering.num_given_back
        metadata = gaps.set_gap(metadata, row, entering.num_given_back)

    def enter(array: jax.Array, rows: jax.Array) -> jax.Array:
        return array.at[row].set(rows, mode="drop")

    metadata = dataclasses.replace(
        metadata,
        block_tables=enter(metadata.block_tables, block),
        context_lengths=enter(metadata.context_lengths, entering.context_lengths),
        num_mapped_blocks=enter(metadata.num_mapped_blocks, num_mapped),
        num_uses=enter(metadata.num_uses, entering.num_uses),
        reference_counts=counts,
        free_blocks=ring.pop(metadata.free_blocks, taken),
    )
    metadata = sequences.note_opened(metadata, row, entering.salts, entering.committed)
    need = jnp.zeros((num_rows,), jnp.int32).at[0].set(taken)
    metadata, _ = counters.settle(metadata, status, served, need)
    return metadata, SwapIn(seq_ids, status), block
