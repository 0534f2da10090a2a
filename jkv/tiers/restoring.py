"""Restoring of spilled blocks and snapshots into a cache."""

import itertools
import operator

import jax
import numpy as np

from jkv.blocks import contents
from jkv.blocks.contents import Contents
from jkv.metadata.ring import Keep
from jkv.state import Cache
from jkv.state.entry import takes_cache
from jkv.tiers import entering
from jkv.tiers.entering import Lanes
from jkv.tiers.snapshots import note_snapshots, put_snapshots
from jkv.tiers.spilled import Layout, Spilled, SpilledBuilder
from jkv.tiers.spilling import check_stores_tokens

LANES_PER_CALL = 64  # columns inserted per program call


@takes_cache(on_host=True)
def restore(
    cache: Cache, spilled: Spilled, *, donate: bool = False
) -> tuple[Cache, int]:
    """Restore blocks spilled by `spill` from this or another cache.

    Call it on the host, outside jit. In order of their chains, blocks go into free,
    uncached blocks, as far as there are any. Blocks already cached, blocks without
    their parent, and blocks beyond `max_context_length` are skipped. All of them, and
    their parents, become the most recently used. A snapshot of a recurrent state with
    its blocks cached takes an empty place, or replaces the least recently used snapshot
    not in `spilled`. Sequences are unchanged.

    Args:
      cache: a cache with `prefix_caching`, and the layers, heads, sizes and dtype of
        the original.
      spilled: from `spill` or `BlockStore.find`; it stays valid.
      donate: if True, write into the storage of `cache`, which becomes invalid, instead
        of a copy.

    Returns:
      The cache, and the number of blocks of all groups and snapshots restored.

    Raises:
      ValueError: for a cache with other groups, shapes or dtypes, without an index, or
        with a sliding window in every layer.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig.toy(prefix_caching=True)
      >>> cache, opened = jkv.allocate(jkv.init(config), 0)
      >>> cache, batch = jkv.append(cache, 0, 9, capacity=9, tokens=jnp.arange(9))
      >>> cache, _ = jkv.free(jkv.commit(cache, batch), 0)
      >>> cache, spilled = jkv.spill(cache, 4)
      >>> jkv.restore(cache, spilled)[1], jkv.restore(jkv.init(config), spilled)[1]
      (2, 2)
    """
    check_stores_tokens(cache)
    if different := spilled.layout.differences(Layout.of(cache)):
        raise ValueError(
            f"cache must have the layers, heads, sizes and dtype of the spilled "
            f"blocks: {'; '.join(different)}"
        )
    spilled = spilled.within(cache.max_context_length)
    stands: np.ndarray | None = None
    num_restored = 0
    numbers = cache.metadata.block_numbers
    if numbers and len(spilled.parents):
        cache, stands, written = _enter_all(cache, spilled, donate=donate)
        for at, (number, blocks) in enumerate(zip(numbers, written, strict=True)):
            nodes = np.flatnonzero(blocks < cache.metadata.groups[number].num_blocks)
            held = [spilled.held[node].arrays for node in nodes.tolist()]
            storage = {
                name: contents.cut_array(
                    np.stack([each[f"block.{at}.{name}"] for each in held], 1)
                )
                for name in (cache.storage[number].arrays if held else ())
            }
            chosen = Contents(storage, spilled.tokens[nodes])
            cache = contents.put(cache, number, blocks[nodes], chosen, donate=donate)
            num_restored += len(nodes)
    cache, num_snapshots = _restore_snapshots(cache, spilled, stands, donate=donate)
    return cache, num_restored + num_snapshots


def _enter_all(
    cache: Cache, spilled: Spilled, *, donate: bool
) -> tuple[Cache, np.ndarray, list[np.ndarray]]:
    """Insert all columns into the index as the most recently used.

    Returns the cache, the leading group's block of each node, i32[Q], N_0 for none, and
    per group the blocks to write, i32[Q], N for none.
    """
    metadata, nothing = cache.metadata, cache.metadata.leading.num_blocks
    num_nodes = len(spilled.parents)
    rest = -num_nodes % LANES_PER_CALL

    def padded(array: np.ndarray) -> np.ndarray:
        return np.pad(array, ((0, rest), *((0, 0),) * (array.ndim - 1)))

    enter = entering.enter_donated if donate else entering.enter
    renew = entering.renew_donated if donate else entering.renew
    stands = np.full(num_nodes + rest, nothing, np.int32)
    written = [np.full_like(stands, g.num_blocks) for g in metadata.block_groups]
    held = [np.zeros(len(stands), bool) for _ in written]
    for node, each in spilled.held.items():
        for group in each.groups:
            held[group][node] = True
    parents = padded(spilled.parents)
    whole = Lanes(
        tokens=padded(spilled.tokens),
        salts=padded(spilled.salts),
        columns=padded(spilled.columns),
        parents=parents,
        above=stands,
        is_first=padded(spilled.parents < 0),
        valid=padded(np.ones(num_nodes, bool)),
        held=tuple(held),
    )
    starts = range(0, num_nodes, LANES_PER_CALL)
    for start in starts:
        at = slice(start, start + LANES_PER_CALL)
        lanes = jax.tree.map(operator.itemgetter(at), whole)._replace(
            parents=np.maximum(parents[at] - start, -1),
            above=np.where(parents[at] >= 0, stands[parents[at]], nothing),
        )
        metadata, entered = enter(metadata, lanes)
        found = jax.device_get(entered)
        stands[at] = found.stands
        for blocks, new in zip(written, found.written, strict=True):
            blocks[at] = new
    is_there = stands[:num_nodes] < nothing
    keep = _raise_parents(spilled, is_there, metadata.num_classes)
    # Eviction starts at the front: children before parents.
    for start in reversed(starts):
        at = slice(start, start + LANES_PER_CALL)
        of_class = keep and Keep(*(padded(each)[at][::-1] for each in keep))
        metadata = renew(metadata, stands[at][::-1], of_class)
    return cache.with_metadata(metadata), stands, written


def _raise_parents(
    spilled: Spilled, is_there: np.ndarray, num_classes: int
) -> Keep | None:
    """Return the class and expiry of each node, at least its descendants'; or None."""
    if num_classes == 1:
        return None
    classes = np.zeros(len(is_there), np.int32)
    until = np.zeros(len(is_there), np.uint32)
    for node, each in spilled.held.items():
        if each.keep is not None:
            classes[node] = min(each.keep[0], num_classes - 1)
            until[node] = each.keep[1]
    for node in np.flatnonzero(is_there & (spilled.parents >= 0))[::-1].tolist():
        parent = spilled.parents[node]
        classes[parent] = max(classes[parent], classes[node])
        until[parent] = max(until[parent], until[node])
    return Keep(classes, until)


def _restore_snapshots(
    cache: Cache, spilled: Spilled, stands: np.ndarray | None, *, donate: bool
) -> tuple[Cache, int]:
    """Restore the snapshots with cached blocks; return their number."""
    nothing = cache.metadata.leading.num_blocks if stands is not None else 0
    nodes = [
        node
        for node, each in spilled.held.items()
        if each.has_snapshot and (stands is None or stands[node] < nothing)
    ]
    if not nodes or cache.metadata.index.snapshot_every is None:
        return cache, 0
    sequences = [spilled.tokens_of(node) for node in nodes]
    held = [spilled.held[node].arrays for node in nodes]
    pending = np.concatenate([each["snapshot.num_pending"] for each in held])
    salts = spilled.salts[nodes].tolist()
    metadata, snapshot_ids = note_snapshots(cache.metadata, sequences, salts, pending)
    is_new = snapshot_ids < metadata.index.num_snapshots
    new = list(itertools.compress(held, is_new))
    cache = put_snapshots(
        cache.with_metadata(metadata), new, snapshot_ids[is_new], donate=donate
    )
    return cache, len(new)


def warm_up(cache: Cache, most: int) -> Cache:
    """Compile `restore` for up to `most` blocks by copying some; donate the cache."""
    builder = SpilledBuilder(cache.block_size)
    builder.add(-1, 0, np.zeros(cache.block_size, np.int32))
    bare = Spilled(layout=Layout.of(cache), **builder.arrays())
    cache, _ = restore(cache, bare, donate=True)
    for number in cache.metadata.block_numbers:
        size = 1
        while size <= min(most, cache.metadata.groups[number].num_blocks):
            blocks = np.arange(size, dtype=np.int32)
            held = contents.fetch(cache, number, blocks)
            cache = contents.put(cache, number, blocks, held, donate=True)
            size *= 2
    return cache
