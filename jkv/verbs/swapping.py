"""swap_out and swap_in: move sequences to host memory, and back to any cache.

Only blocks with tokens are transferred, shared ones once (`jkv.blocks.contents`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata import requests, tables
from jkv.metadata.part import SwappedContents, parts_of
from jkv.metadata.requests import Integers
from jkv.state import Cache, Metadata, Pruned
from jkv.state.entry import takes_cache
from jkv.status import Status
from jkv.storage.swapped import Swapped, copy_out, match_groups
from jkv.verbs.allocation import free


class SwapIn(NamedTuple):
    """Result of `swap_in`, one entry per sequence, in the order swapped out."""

    seq_ids: jax.Array  # i32[B], the new ids, all -1 if refused
    status: jax.Array  # i32[B], `Status`, the same for all


@takes_cache(on_host=True)
def swap_out(cache: Cache, seq_ids: Integers) -> tuple[Cache, Swapped]:
    """Move sequences to the host and free them. For the host, outside jit.

    Sequences that share their blocks may stay. The blocks with tokens are gathered on
    the device, which needs that much memory until the transfer is done.

    Recorded tokens and cache salts move along. Indexed blocks stay cached until
    evicted.

    Args:
      cache: the cache.
      seq_ids: i32[B] or int; -1 is padding and does not appear in the result.

    Returns:
      The new cache, as after `free`, and the sequences.

    Raises:
      InvalidSequence: if an id is not open or is repeated; the cache is unchanged.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=4, max_sequences=2,
      ...     max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [64])
      >>> cache, swapped = jkv.swap_out(cache, opened.seq_ids)
      >>> int(jkv.num_free_blocks(cache)), swapped.num_sequences
      (4, 1)
    """
    swapped = copy_out(cache, seq_ids)
    cache, _ = free(cache, seq_ids)
    return cache, swapped


@takes_cache(on_host=True)
def swap_in(
    cache: Cache, swapped: Swapped, *, donate: bool = False
) -> tuple[Cache, SwapIn]:
    """Open swapped sequences again, all or none. For the host, outside jit.

    They may enter any cache with the same groups of layers, heads, head and block
    sizes, and dtype. Blocks shared among the swapped sequences are shared again; blocks
    shared with other sequences become copies. Tokens without recorded ids read as -1 in
    a cache that records them.

    Reserved blocks are reserved again, so that `append` is still not refused;
    `truncate` to the current length drops the reservation. Sequences are stamped by
    this cache's clock, as by `allocate`, and keep their use counts. A sequence with
    committed blocks commits no further ones.

    Args:
      cache: the cache.
      swapped: the result of `swap_out`; it stays valid.
      donate: write in place of the old cache's storage, which becomes invalid, instead
        of a copy. Otherwise the device temporarily holds the storage twice.

    Returns:
      The new cache and a `SwapIn`. Status: OK, CONTEXT_FULL (a sequence exceeds this
      cache's `max_context_length`), OUT_OF_SEQUENCES or OUT_OF_BLOCKS (in any group).

    Raises:
      ValueError: if the sequences come from a cache of other groups, shape or dtype, or
        lack tokens inside this cache's window: for a larger window than the source's,
        the whole blocks that were kept count.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=4, max_sequences=2,
      ...     max_context_length=64)
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
    groups = match_groups(cache, swapped)
    if swapped.num_sequences == 0:
        none = jnp.zeros((0,), jnp.int32)
        return cache, SwapIn(none, none)
    metadata, result, tables = _open(
        cache.metadata, _Entering.of(swapped, groups, cache)
    )
    if int(result.status[0]) != Status.OK:
        return cache.with_metadata(metadata), result

    seq_ids, cache = np.asarray(result.seq_ids), cache.with_metadata(metadata)
    for number, of_group in enumerate(groups):
        rows = tables.get(number)
        cache = of_group.put(cache, number, seq_ids, rows, donate=donate)
    return cache, result


class _Entering(NamedTuple):
    """Sequences to open, as `_open` takes them; all arrays on the host."""

    context_lengths: Any  # i32[B]
    num_uses: Any  # u32[B]
    committed: Any  # i32[B]
    salts: Any  # i32[B]
    num_pending: Any  # i32[B]
    num_dropped: Any  # i32[B]; None in a cache without pruning
    num_left: Any  # i32[B], likewise
    too_long: Any  # bool[], True if one exceeds the block tables
    to_enter: dict[int, Any]  # arguments of `Part.enter`, by group

    @classmethod
    def of(
        cls, swapped: Swapped, groups: tuple[SwappedContents, ...], cache: Cache
    ) -> "_Entering":
        """Fit swapped sequences to a cache."""
        columns, lengths = cache.max_blocks_per_sequence, swapped.context_lengths
        zeros, salts, pending = 0 * lengths, swapped.salts, swapped.num_pending
        # The blocks are not in this cache's index. Equal indexed blocks cannot replace
        # them, as the last bits may differ, and no block is indexed before its parent:
        # a sequence with committed blocks stops committing (-1).
        visible = lengths if swapped.committed is None else swapped.committed
        visible = np.where(swapped.is_pruned, np.int32(-1), visible)
        dropped, left = swapped.num_dropped, swapped.num_left
        has_pruning = cache.metadata.sequences.pruned.is_there
        return cls(
            context_lengths=lengths,
            num_uses=swapped.num_uses,
            committed=np.where(visible != 0, np.int32(-1), np.int32(0)),
            salts=_or_zeros(salts, zeros),
            num_pending=_or_zeros(pending, zeros),
            num_dropped=_or_zeros(dropped, zeros) if has_pruning else None,
            num_left=_or_zeros(left, zeros) if has_pruning else None,
            too_long=not all(each.fits(columns) for each in groups)
            or np.any(lengths > cache.max_context_length),
            to_enter={i: each.to_enter(columns) for i, each in enumerate(groups)},
        )


def _or_zeros(counts: np.ndarray | None, zeros: np.ndarray) -> np.ndarray:
    return zeros if counts is None else counts


@jax.jit
def _open(
    metadata: Metadata, entering: _Entering
) -> tuple[Metadata, SwapIn, dict[int, jax.Array]]:
    """Open all sequences, or none; also return their block tables by group."""
    num_rows = entering.context_lengths.shape[0]
    parts = parts_of(metadata)
    plans = [part.enter(metadata, entering.to_enter) for part in parts]
    no_block = requests.agree([plan.lacks for plan in plans]).no_block
    causes = [
        (Status.CONTEXT_FULL, entering.too_long),
        (Status.OUT_OF_SEQUENCES, metadata.sequences.free_rows.count < num_rows),
        (Status.OUT_OF_BLOCKS, no_block),
    ]
    cause = requests.find_status(jnp.zeros((1,), bool), causes)
    status = jnp.full((num_rows,), cause)
    served = status == Status.OK
    lengths = entering.context_lengths
    metadata, seq_ids = tables.open_rows(metadata, served, lengths)
    row = jnp.where(served, seq_ids, metadata.max_sequences)
    new_tables: dict[int, jax.Array] = {}
    for part, plan in zip(parts, plans, strict=True):
        metadata, of_part = plan.apply(metadata, row)
        if of_part is not None:
            new_tables |= dict.fromkeys(part.numbers, of_part)
    opened = metadata.sequences.read(row)
    uses = jax.lax.bitcast_convert_type(jnp.asarray(entering.num_uses), jnp.int32)
    metadata = metadata.with_rows(row, opened._replace(num_uses=uses))
    metadata = metadata.index.enter(metadata, row, entering.salts, entering.committed)
    metadata = metadata.with_pending(row, entering.num_pending)
    pruned = metadata.sequences.pruned
    if isinstance(pruned, Pruned):
        pruned = pruned.with_rows(row, entering.num_dropped, entering.num_left)
        metadata = metadata.with_pruned(pruned)
    metadata = requests.settle(metadata, status, served)
    return metadata, SwapIn(seq_ids, status), new_tables
