"""prune: keep some tokens of sequences, and return the blocks of the others."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.blocks.row_copies import Rotate, RowCopies, copy_rows
from jkv.metadata import requests
from jkv.metadata.part import Moves, Selection, Served, apply_plans, parts_of
from jkv.metadata.requests import Integers
from jkv.state import BlockStorage, Cache, Metadata, Pruned
from jkv.state.entry import takes_cache
from jkv.status import Status, UsageError

_LAST_POSITION = np.iinfo(np.int32).max


@takes_cache()
def prune(
    cache: Cache,
    seq_ids: Integers,
    kept: jax.Array | Sequence[jax.Array],
    num_kept: Integers,
    *,
    rotate: Rotate | None = None,
) -> tuple[Cache, jax.Array]:
    """Keep some tokens of sequences, and drop all others with their blocks.

    The kept tokens are packed: they get the slots from 0 on, in order, and the context
    length becomes `num_kept`. Positions go on as if nothing had been dropped: the next
    token's is in `next_positions` and may exceed `max_context_length`, which counts
    slots. Whole, aligned blocks are moved in the table without a copy, and leading
    blocks that stay are still shared and cached. A pruned sequence commits nothing
    until it is truncated to 0; `truncate` and `fork` with lengths cut it to 0 or to
    `num_kept` and more tokens.

    Layers with a sliding window keep their sinks and the newest tokens, which move
    behind the others: to slots that equal positions in the window if the newest
    `window` tokens were kept. Recurrent states stay. Outside jit the host checks if
    rows must be copied, and then copies the whole storage: jit and donate.

    Args:
      cache: the cache, with `CacheConfig(pruning=True)`.
      seq_ids: i32[B] or int; -1 is padding.
      kept: i32[B, C], slots to keep in all layers and heads, ascending; or i32[B, L, K,
        C], slots of each layer and kv head. With several groups of layers without a
        window, i32[B, C] or a tuple with one array for each of them, of its L layers
        and K heads. Entries from `num_kept` on are ignored.
      num_kept: i32[B] or int, number of kept tokens, 0 to C.
      rotate: closes the gaps of positions: called as `rotate(keys f32[P, K, T, D],
        delta i32[P, K or 1, T], layer)`, it returns keys rotated by `delta` positions
        (0 or negative) for the model's `layer`, i32[]. Positions are slots again. All
        rows after the first gap are copied, and formats below float32 round their keys
        once more. Pass the same function object in every call, as a new one is compiled
        again.

    Returns:
      The new cache and i32[B] of `Status`: OK, INVALID_SEQUENCE, INVALID_ARGUMENT
      (`num_kept` below 0 or above C; slots that are negative, not ascending, or at or
      past the context length; fewer tokens than a window's or the pending ones;
      `rotate` after a prune without it, or with recurrent states and no token kept
      before the pending ones), CONTEXT_FULL (positions would exceed 2^31 - 1) or
      OUT_OF_BLOCKS (rows of a shared block are copied to a block free before the
      call; a window's rows may span one block more at their new slots).

    Raises:
      ValueError: if the cache has no pruning, or `kept` has the wrong kind or shape.
      NotImplementedError: if the cache is sharded over a context axis.

    Example:
      >>> import jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy(pruning=True)), [0])
      >>> cache, _ = jkv.append(cache, [0], [14], capacity=14)
      >>> kept = [[*range(4), *range(8, 14)]]  # drop tokens 4 to 7
      >>> cache, status = jkv.prune(cache, [0], kept, [10])
      >>> jkv.context_lengths(cache).tolist(), jkv.next_positions(cache).tolist()
      ([10, 0, 0, 0], [14, 0, 0, 0])
      >>> jkv.block_ids(cache, 0).tolist()  # block 1 is free, none was copied
      [0, 2, 3, 8]
    """
    _check_cache(cache)
    seq_ids, num_kept = requests.broadcast(seq_ids=seq_ids, num_kept=num_kept)
    selected = _read_kept(cache, kept, len(seq_ids))
    if len(seq_ids) == 0:
        return cache, jnp.zeros((0,), jnp.int32)
    metadata, status, moves = _prune(
        cache.metadata, seq_ids, selected, num_kept, rotates=rotate is not None
    )
    storage = list(cache.storage)
    for number, copies in moves.items():
        layers = cache.layers_of(number)
        storage[number] = copy_rows(storage[number], copies, layers, rotate)
    return cache.with_metadata(metadata).with_storage(tuple(storage)), status


def _check_cache(cache: Cache) -> None:
    """Refuse caches without pruning, and ones sharded within blocks."""
    if not cache.metadata.sequences.pruned.is_there:
        raise UsageError(
            "cache must have pruning=True to be pruned; create it with "
            "CacheConfig(pruning=True), in every group of a GroupedConfig"
        )
    for storage in cache.block_storage:
        if storage.sharding is not None and storage.sharding.context is not None:
            raise NotImplementedError(
                f"prune does not support a cache sharded over context="
                f"{storage.sharding.context!r}, whose rows would cross devices; shard "
                f"it over heads"
            )


def _read_kept(
    cache: Cache, kept: jax.Array | Sequence[jax.Array], num_requests: int
) -> dict[int, jax.Array]:
    """Return the slots of each group without a window, i32[B, X, C]; check them."""
    groups = cache.metadata.groups
    numbers = cache.metadata.block_numbers
    full = [i for i in numbers if groups[i].window.length is None]
    if isinstance(kept, tuple):
        if len(kept) != len(full):
            raise UsageError(
                f"kept must be one array, or a tuple of {len(full)}, one for each "
                f"group without a window, got {len(kept)}"
            )
        each = dict(zip(full, kept, strict=True))
    else:
        # Without such a group, windows keep their rows and only the number counts.
        each = dict.fromkeys(full or numbers[:1], kept)
    is_same = not isinstance(kept, tuple) and len(each) > 1
    found = {
        number: _read_slots(cache, number, slots, num_requests, is_same)
        for number, slots in each.items()
    }
    widths = {slots.shape[-1] for slots in found.values()}
    if len(widths) > 1:
        raise UsageError(f"kept must have arrays of one width C, got {sorted(widths)}")
    return found


def _read_slots(
    cache: Cache, number: int, slots: Any, num_requests: int, is_same: bool
) -> jax.Array:
    """Return slots of one group as i32[B, X, C], X 1 or L * K."""
    array = requests.as_slots(slots)
    storage: BlockStorage = cache.storage[number]
    num_layers = len(cache.layers_of(number))
    whole = (num_requests, num_layers, storage.num_kv_heads)
    if array.shape[:-1] == whole[:1]:
        found = array[:, None]
    elif array.shape[:-1] == whole and not is_same:
        found = array.reshape(num_requests, -1, array.shape[-1])
    else:
        named = "" if is_same else f" or i32{[*whole, 'C']}".replace("'", "")
        more = "; pass a tuple with one array per group" if is_same else ""
        raise UsageError(
            f"kept must be i32[{num_requests}, C]{named}, one row for each of "
            f"{num_requests} requests, got {array.dtype}{list(array.shape)}{more}"
        )
    # At least one column, so that an empty selection needs no case of its own.
    return found if found.shape[-1] else jnp.zeros((*found.shape[:-1], 1), jnp.int32)


@functools.partial(jax.jit, static_argnames="rotates")
def _prune(
    metadata: Metadata,
    seq_ids: jax.Array,
    kept: dict[int, jax.Array],
    num_kept: jax.Array,
    *,
    rotates: bool,
) -> tuple[Metadata, jax.Array, dict[int, RowCopies]]:
    """Return the metadata, the statuses, and the copies by group."""
    padding = requests.is_padding(seq_ids)
    before = metadata.sequences.read(seq_ids)
    live = requests.is_open(metadata, seq_ids, before)
    live &= requests.is_first_mention(metadata, seq_ids)
    lengths = jnp.asarray(before.context_length)
    selection = Selection(seq_ids, lengths, kept, num_kept, rotates)
    looks = [part.prune(metadata, selection) for part in parts_of(metadata)]
    wrong = requests.any_of(
        [_find_wrong(selection), *(mask for look in looks for mask in look.wrongs)]
    )
    pruned = metadata.sequences.pruned
    num_dropped = pruned.positions_of(seq_ids, lengths) - num_kept
    if rotates:  # keys are rotated from their slots, which must be their positions
        wrong |= pruned.positions_of(seq_ids, lengths) != lengths
        num_dropped = jnp.zeros_like(num_kept)
    most = _LAST_POSITION - metadata.max_context_length
    causes = [
        (Status.INVALID_SEQUENCE, ~live),
        (Status.INVALID_ARGUMENT, wrong),
        (Status.CONTEXT_FULL, num_dropped > most),
    ]
    status = requests.find_status(padding, causes)
    eligible = (status == Status.OK) & ~padding
    plans = [look.judge(eligible) for look in looks]
    no_block = requests.agree([plan.lacks for plan in plans]).no_block
    status = jnp.where(no_block, jnp.int32(Status.OUT_OF_BLOCKS), status)
    done = Served(eligible & ~no_block, seq_ids)

    metadata, moves = apply_plans(metadata, plans, done)
    row = done.rows(metadata)
    assert isinstance(pruned, Pruned)
    metadata = metadata.with_pruned(pruned.with_rows(row, num_dropped, num_kept))
    metadata = stop_commits(metadata, row, seq_ids)
    metadata = requests.mark_used(metadata, row, before, num_kept)
    metadata = requests.settle(metadata, status, done.served)
    return metadata, status, _list_copies(metadata, moves)


def _find_wrong(selection: Selection) -> jax.Array:
    """Return True for invalid counts or slots, bool[B]."""
    num_kept, width = selection.num_kept, selection.width
    wrong = (num_kept < 0) | (num_kept > width)
    for kept in selection.kept.values():
        first = jnp.full((*kept.shape[:2], 1), -1, jnp.int32)
        before = jnp.concatenate([first, kept[..., :-1]], axis=-1)
        fits = (kept > before) & (kept < selection.lengths[:, None, None])
        index = jnp.arange(width, dtype=jnp.int32)[None, None]
        wrong |= ~jnp.all(fits | (index >= num_kept[:, None, None]), axis=(1, 2))
    return wrong


def stop_commits(metadata: Metadata, row: jax.Array, seq_ids: jax.Array) -> Metadata:
    """Stop commits of rows, i32[B], whose tokens no longer determine their keys."""
    known = metadata.index.leave(seq_ids)
    if known is None:
        return metadata
    _, salts = known
    return metadata.index.enter(metadata, row, salts, jnp.full_like(row, -1))


def _list_copies(metadata: Metadata, moves: tuple[Moves, ...]) -> dict[int, RowCopies]:
    """Return the copies of the groups with blocks."""
    of_parts = zip(parts_of(metadata), moves, strict=True)
    return {
        number: copies
        for part, copies in of_parts
        if copies is not None
        for number in part.numbers
    }
