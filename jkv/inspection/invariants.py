"""check: recount everything on the host and name what does not agree.

The invariants are those that `Metadata` lists. The recount is plain numpy over the
tables and shares no code with the verbs, so that a fault in them cannot hide itself.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jkv.config.layout import ArrayLayout, Sizes, lay_out
from jkv.inspection.arrays import named_arrays
from jkv.inspection.given_back import check_given_back, gone_columns
from jkv.state import Cache, Metadata, PrefixIndex, Ring
from jkv.state.entry import for_host
from jkv.status import InvariantError


@for_host
def check(cache: Cache) -> None:
    """Raise if an invariant of the cache is broken. For the host, outside jit.

    Args:
      cache: a concrete cache; its metadata is copied to the host.

    Raises:
      InvariantError: the message begins with the invariant's name in `Metadata`.

    Example:
      >>> import jkv
      >>> jkv.check(jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)))
    """
    for broken in (
        _shapes(cache),
        *(find(cache.metadata) for find in _INVARIANTS),
    ):
        for message in broken:
            raise InvariantError(message)


def _shapes(cache: Cache) -> Iterator[str]:
    try:
        expected = lay_out(_implied_sizes(cache))
    except IndexError:
        yield "shapes: block_tables, reference_counts, keys or values lack an axis"
        return
    found = named_arrays(cache)
    for name in expected | found:
        if name not in found:
            yield f"shapes: {name} is missing"
        elif name not in expected:
            yield f"shapes: {name} has no place in a cache of {cache.dtype.name}"
        elif (kind := _kind(found[name])) != (wanted := _kind(expected[name])):
            yield f"shapes: {name} is {kind}, expected {wanted}"


def _implied_sizes(cache: Cache) -> Sizes:
    """Return the sizes that a few of the arrays tell of all the others."""
    values_in_keys = cache.latent_value_dim is not None
    has_values = values_in_keys or cache.values is not None
    window = cache.metadata.window
    return Sizes(
        num_layers=cache.num_layers,
        num_kv_heads=cache.keys.shape[2],  # with copies on a mesh
        head_dim=cache.head_dim,
        num_blocks=cache.num_blocks,
        max_sequences=cache.max_sequences,
        max_context_length=cache.max_context_length,
        block_size=cache.block_size,
        value_head_dim=cache.value_head_dim if has_values else cache.head_dim,
        values_in_keys=values_in_keys,
        dtype=cache.dtype,
        record_tokens=cache.metadata.tokens is not None,
        prefix_caching=cache.metadata.prefix is not None,
        sliding_window=None if window is None else window.length,
        num_sink_tokens=0 if window is None else window.num_sink_tokens,
    )


def _kind(array: jax.Array | ArrayLayout) -> str:
    return f"{np.dtype(array.dtype)}{list(array.shape)}"


def _block_tables(meta: Metadata) -> Iterator[str]:
    tables = np.asarray(meta.block_tables)
    mapped = np.asarray(meta.num_mapped_blocks)
    for row in range(meta.max_sequences):
        used, rest = tables[row, : mapped[row]], tables[row, max(mapped[row], 0) :]
        start, end = gone_columns(meta, row)
        if np.any(used[start:end] != meta.num_blocks):
            yield f"block_tables: row {row} names a block that it gave back"
        used = np.delete(used, slice(start, end))
        if np.any((used < 0) | (used >= meta.num_blocks)):
            yield f"block_tables: row {row} maps an id outside the pool"
        if np.any(rest != meta.num_blocks):
            yield f"block_tables: row {row} names a block past its mapped ones"
        if np.unique(used).size != used.size:
            yield f"block_tables: row {row} maps a block twice"


def _mapped_blocks(meta: Metadata) -> Iterator[str]:
    lengths = np.asarray(meta.context_lengths, np.int64)
    mapped = np.asarray(meta.num_mapped_blocks)
    needed = -(-lengths // meta.block_size)
    columns = meta.max_blocks_per_sequence
    for row in np.flatnonzero((mapped < needed) | (mapped > columns)):
        yield (
            f"mapped_blocks: row {row} has {lengths[row]} tokens in {mapped[row]} "
            f"blocks of {meta.block_size}, at most {columns}"
        )
    for row in np.flatnonzero((lengths < 0) | (lengths > meta.max_context_length)):
        yield f"mapped_blocks: row {row} has an impossible length {lengths[row]}"


def _closed_rows(meta: Metadata) -> Iterator[str]:
    lengths = np.asarray(meta.context_lengths)
    mapped = np.asarray(meta.num_mapped_blocks)
    closed = ~np.asarray(meta.is_open)
    for row in np.flatnonzero(closed & ((lengths != 0) | (mapped != 0))):
        yield (
            f"closed_rows: row {row} is closed but has {lengths[row]} tokens and "
            f"{mapped[row]} blocks"
        )


def _reference_counts(meta: Metadata) -> Iterator[str]:
    counts = np.asarray(meta.reference_counts)
    recount = _recount(meta)
    for block in np.flatnonzero(counts != recount):
        yield (
            f"reference_counts: block {block} has count {counts[block]}, the tables "
            f"name it {recount[block]} times"
        )


def _partition(meta: Metadata) -> Iterator[str]:
    live = int(np.sum(_recount(meta) > 0))
    free = int(meta.free_blocks.count)
    if live + free != meta.num_blocks:
        yield (
            f"partition: {free} free and {live} live blocks, the pool has "
            f"{meta.num_blocks}"
        )


def _free_blocks(meta: Metadata) -> Iterator[str]:
    free = np.flatnonzero(_recount(meta) == 0)
    positions = None if meta.prefix is None else np.asarray(meta.prefix.positions)
    yield from _ring_holds("free_blocks", "block", meta.free_blocks, free, positions)


def _free_sequences(meta: Metadata) -> Iterator[str]:
    closed = np.flatnonzero(~np.asarray(meta.is_open))
    yield from _ring_holds("free_sequences", "row", meta.free_sequences, closed)


def _private_tail(meta: Metadata) -> Iterator[str]:
    tables = np.asarray(meta.block_tables)
    lengths = np.asarray(meta.context_lengths)
    mapped = np.asarray(meta.num_mapped_blocks)
    counts = _recount(meta)
    for row in range(meta.max_sequences):
        writable = tables[row, lengths[row] // meta.block_size : mapped[row]]
        for block in writable[counts[writable] > 1]:
            yield (
                f"private_tail: block {block}, which row {row} may still write, has "
                f"{counts[block]} owners"
            )


def _prefix_blocks(meta: Metadata) -> Iterator[str]:
    prefix, tokens = meta.prefix, meta.tokens
    if prefix is None or tokens is None:
        return
    hashes, parents = np.asarray(prefix.hashes), np.asarray(prefix.parents)
    salts, contents = np.asarray(prefix.salts), np.asarray(tokens)
    indexed = np.flatnonzero(hashes)
    for block in indexed[~np.isin(indexed, np.asarray(prefix.buckets))]:
        yield f"prefix_index: block {block} is indexed, but in no bucket"
    chains: dict[tuple[Any, ...], int] = {}
    for block in indexed.tolist():
        parent = int(parents[block])
        if parent != meta.num_blocks and (hashes[parent] == 0 or parent == block):
            yield f"prefix_index: the parent {parent} of block {block} is not indexed"
        elif parent != meta.num_blocks and salts[parent] != salts[block]:
            yield f"prefix_index: block {block} has another domain than its parent"
        if np.any(contents[block] < 0):
            yield f"prefix_index: block {block} is indexed without all of its tokens"
        key: tuple[Any, ...] = (parent, int(salts[block]), contents[block].tobytes())
        if prefix.wide_hashes is not None:
            words = [hashes[block], *np.asarray(prefix.wide_hashes)[block]]
            key = (*key, tuple(words))
        if key in chains:
            yield f"prefix_index: blocks {chains[key]} and {block} are equal"
        chains[key] = block
    yield from _eviction_order(meta, prefix, indexed)


def _eviction_order(
    meta: Metadata, prefix: PrefixIndex, indexed: np.ndarray
) -> Iterator[str]:
    """A parent is handed out after its children: it is live, or behind them."""
    ring, positions = meta.free_blocks, np.asarray(prefix.positions)
    parents = np.asarray(prefix.parents)
    live = _recount(meta) > 0
    for block in np.flatnonzero(live & (positions != -1)):
        yield f"free_blocks: block {block} is live but has a place in the ring"
    turn = (positions - int(ring.head)) % ring.ids.shape[0]
    children = indexed[parents[indexed] != meta.num_blocks]
    for block in children[~live[parents[children]]]:
        if live[block] or turn[block] > turn[parents[block]]:
            yield f"prefix_index: block {block} outlives its parent {parents[block]}"


def _committed(meta: Metadata) -> Iterator[str]:
    """What a sequence committed is indexed, a chain of parents; the rest is not."""
    prefix = meta.prefix
    if prefix is None:
        return
    tables, hashes = np.asarray(meta.block_tables), np.asarray(prefix.hashes)
    parents, mapped = np.asarray(prefix.parents), np.asarray(meta.num_mapped_blocks)
    lengths, committed = np.asarray(meta.context_lengths), np.asarray(prefix.committed)
    for row in np.flatnonzero(np.asarray(meta.is_open)):
        if not -1 <= committed[row] <= lengths[row]:
            yield f"committed: row {row} has {committed[row]} of {lengths[row]} tokens"
            continue
        num = max(int(committed[row]), 0) // meta.block_size
        chain, rest = tables[row, :num], tables[row, num : mapped[row]]
        before = np.concatenate([[meta.num_blocks], chain])[:num]
        if meta.window is not None:  # then blocks have no parents
            first, last = gone_columns(meta, int(row))
            chain = np.delete(chain, np.s_[first : min(last, num)])
            rest = rest[rest < meta.num_blocks]
            before = np.full_like(chain, meta.num_blocks)
        if np.any(hashes[chain] == 0) or np.any(parents[chain] != before):
            yield f"committed: the blocks that row {row} committed are no chain"
        if np.any(hashes[rest] != 0):
            yield f"committed: row {row} may still write an indexed block"


# Tables first: the recounts of the others rely on them.
_INVARIANTS = (
    _block_tables,
    _mapped_blocks,
    _closed_rows,
    _reference_counts,
    _partition,
    _free_blocks,
    _free_sequences,
    _private_tail,
    _prefix_blocks,
    _committed,
    check_given_back,
)


def _recount(meta: Metadata) -> np.ndarray:
    """Count the table entries that name each block, i64[N]."""
    tables = np.asarray(meta.block_tables)
    columns = np.arange(tables.shape[1])
    entries = tables[columns < np.asarray(meta.num_mapped_blocks)[:, None]]
    if meta.window is not None:
        entries = entries[entries < meta.num_blocks]
    return np.bincount(entries, minlength=meta.num_blocks)


def _ring_holds(
    name: str,
    unit: str,
    ring: Ring,
    expected: np.ndarray,
    positions: np.ndarray | None = None,
) -> Iterator[str]:
    """Compare the live entries of a ring with the ids that belong in it."""
    capacity = ring.ids.shape[0]
    head, span, count, fewest = np.asarray(ring.bounds).tolist()
    if not (0 <= head < capacity and 0 <= fewest <= count <= span <= capacity):
        yield (
            f"{name}: head {head}, span {span}, count {count} and fewest {fewest} of a "
            f"ring of {capacity}"
        )
        return
    places = (head + np.arange(span)) % capacity
    ids = np.asarray(ring.ids)[places]
    if positions is not None:  # an entry whose id is elsewhere is a hole
        ids = ids[positions[ids] == places]
    if len(ids) != count:
        yield f"{name}: {len(ids)} entries of the ring hold an id, its count is {count}"
    for entry in ids[~np.isin(ids, expected)]:
        yield f"{name}: {unit} {entry} is in the ring but not free"
    for entry in expected[~np.isin(expected, ids)]:
        yield f"{name}: {unit} {entry} is free but not in the ring"
    if np.unique(ids).size != ids.size:
        yield f"{name}: a {unit} is in the ring twice"
