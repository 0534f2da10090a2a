"""Spilling of cached blocks from a cache to host memory."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import as_index
from jkv.blocks import contents
from jkv.metadata.requests import Integer
from jkv.prefixes.prefix_index import index_of
from jkv.prefixes.snapshots import snapshots_of
from jkv.state import Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.state.index import Found
from jkv.status import UsageError
from jkv.tiers.choosing import Chosen, choose, forget
from jkv.tiers.snapshots import fetch_snapshots
from jkv.tiers.spilled import Layout, Spilled, SpilledBuilder

ROWS_PER_CALL = 64  # token rows per copy to the host


@takes_cache(on_host=True)
def spill(cache: Cache, num_blocks: Integer) -> tuple[Cache, Spilled]:
    """Spill the least recently used cached blocks to the host.

    Call it on the host, outside jit. The blocks were free and stay free; their contents
    are copied, and removed from the prefix index. A block of the leading group is
    spilled with the blocks of other groups at its position, and the snapshot at its
    end. If fewer snapshots than `num_blocks` are empty, the least recently used
    snapshots are spilled too, at most until half are empty. Without
    groups with blocks, `num_blocks` counts snapshots.

    Args:
      cache: a cache with `prefix_caching` and a leading group with full attention: for
        sliding windows, the index has only hashes of the prefix, without tokens.
      num_blocks: int, number per group; fewer if fewer are cached.

    Returns:
      The cache, and the spilled blocks.

    Raises:
      ValueError: for a cache without an index, or with a sliding window in every layer.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig.toy(prefix_caching=True)
      >>> cache, opened = jkv.allocate(jkv.init(config), 0)
      >>> prompt = jnp.arange(9)
      >>> cache, batch = jkv.append(cache, 0, 9, capacity=9, tokens=prompt)
      >>> cache, _ = jkv.free(jkv.commit(cache, batch), 0)
      >>> cache, spilled = jkv.spill(cache, 4)
      >>> jkv.match(cache, prompt[None]).tolist()
      [0]
      >>> cache, num_restored = jkv.restore(cache, spilled)
      >>> num_restored, jkv.match(cache, prompt[None]).tolist()
      (2, [8])
    """
    check_stores_tokens(cache)
    most = max((g.num_blocks for g in cache.metadata.block_groups), default=0)
    count = int(np.clip(int(as_index(num_blocks)), 0, 2**30))
    return take(cache, count, 1 << (max(min(count, most), 1) - 1).bit_length())


def take(cache: Cache, count: int, width: int) -> tuple[Cache, Spilled]:
    """Implement `spill` with programs for at most `width` blocks per group."""
    metadata, builder = cache.metadata, SpilledBuilder(cache.block_size)
    blocks: tuple[np.ndarray, ...] = ()
    spilled: dict[int, int] = {}  # prefix hashes by node, of the leading group
    numbers = metadata.block_numbers
    if numbers:
        chosen = jax.device_get(choose(metadata, jnp.int32(count), width=width))
        nodes = _add_chains(cache, chosen, builder)
        blocks = chosen.blocks
        spilled = {
            nodes[block]: int(chosen.hashes[block])
            for block in blocks[numbers.index(metadata.leader)].tolist()
            if block < metadata.leading.num_blocks
        }
        for at, number in enumerate(numbers):
            is_there = blocks[at] < metadata.groups[number].num_blocks
            holders = iter([nodes[b] for b in chosen.above[at][is_there].tolist()])
            for arrays in _fetch_pieces(cache, number, blocks[at][is_there]):
                builder.hold(holders, arrays)
    snapshot_ids = _choose_snapshots(cache, count, builder, spilled)
    if snapshot_ids:
        builder.hold(
            iter(snapshot_ids.values()), fetch_snapshots(cache, [*snapshot_ids])
        )
    num_snapshots = metadata.index.num_snapshots
    gone = np.full(max(num_snapshots, 1), num_snapshots, np.int32)
    gone[: len(snapshot_ids)] = list(snapshot_ids)
    cache = cache.with_metadata(forget(metadata, blocks, gone))
    return cache, Spilled(layout=Layout.of(cache), **builder.arrays())


def copy_prefix(cache: Cache, tokens: np.ndarray, salt: int) -> Spilled:
    """Copy the cached blocks of a sequence, i32[n], to the host; they stay cached."""
    builder, size = SpilledBuilder(cache.block_size), cache.block_size
    padded = np.full((1, cache.max_context_length), -1, np.int32)
    padded[0, : len(tokens)] = tokens[: cache.max_context_length]
    salts = np.full((1,), salt, np.int32)
    found = jax.device_get(_find(cache.metadata, padded, salts))
    columns = tokens[: int(found.num_blocks[0]) * size].reshape(-1, size)
    nodes: list[int] = []
    for column in columns:
        nodes.append(builder.add(nodes[-1] if nodes else -1, salt, column))
    for number in cache.metadata.block_numbers if nodes else ():
        blocks = found.groups[number].blocks[0, : len(nodes)]
        is_there = blocks < cache.metadata.groups[number].num_blocks
        holders = iter(np.array(nodes)[is_there].tolist())
        for arrays in _fetch_pieces(cache, number, blocks[is_there]):
            builder.hold(holders, arrays)
    if found.state is not None and found.state.snapshot_id[0] < found.state.none:
        snapshot = fetch_snapshots(cache, found.state.snapshot_id.tolist())
        builder.hold(iter(nodes[-1:]), snapshot)
    return Spilled(layout=Layout.of(cache), **builder.arrays())


@jax.jit
def _find(metadata: Metadata, tokens: jax.Array, salts: jax.Array) -> Found:
    return metadata.index.find(metadata, tokens, salts)


def stores_tokens(cache: Cache) -> bool:
    """Return True if the index of a cache has the tokens of its blocks."""
    return index_of(cache.metadata).wide_hashes is None


def check_stores_tokens(cache: Cache) -> None:
    """Raise if the index of a cache has no tokens of its blocks."""
    if not stores_tokens(cache):
        raise UsageError(
            "cache must have a group of layers with full attention, got a sliding "
            "window in every attention layer, for which the index has hashes instead "
            "of tokens; use spill and restore with other caches only"
        )


def _add_chains(
    cache: Cache, chosen: Chosen, builder: SpilledBuilder
) -> dict[int, int]:
    """Add the prefixes of chosen blocks; return nodes by block of the leading group."""
    nothing = cache.metadata.leading.num_blocks
    order: dict[int, None] = {}
    for block in np.unique(np.concatenate(chosen.above)).tolist():
        chain = []
        while block < nothing and block not in order:
            chain.append(block)
            block = int(chosen.parents[block])
        order.update(dict.fromkeys(reversed(chain)))
    recorded = cache.metadata.tokens
    assert recorded is not None, "an index comes with recorded tokens"
    tokens = _read_rows(recorded, np.array([*order], np.int32))
    nodes = {nothing: -1}
    for block, row in zip(order, tokens, strict=True):
        parent = nodes[int(chosen.parents[block])]
        node = nodes[block] = builder.add(parent, int(chosen.salts[block]), row)
        if chosen.kept:
            of_class, until = (int(each[block]) for each in chosen.kept)
            builder.keep[node] = of_class, until
    return nodes


def _read_rows(array: jax.Array, rows: np.ndarray) -> np.ndarray:
    """Copy rows, i32[P], of an array to the host, with one program for any P."""
    starts = range(0, max(len(rows), 1), ROWS_PER_CALL)
    padded = np.resize(rows if len(rows) else 0, starts[-1] + ROWS_PER_CALL)
    parts = [_gather(array, padded[i : i + ROWS_PER_CALL]) for i in starts]
    return np.concatenate(jax.device_get(parts))[: len(rows)]


@jax.jit
def _gather(array: jax.Array, rows: jax.Array) -> jax.Array:
    return array.at[rows].get(mode="clip")


def _fetch_pieces(
    cache: Cache, number: int, blocks: np.ndarray
) -> Iterator[dict[str, np.ndarray]]:
    """Yield blocks of one group, i32[P], as host arrays by path in `Held`."""
    at = cache.metadata.block_numbers.index(number)
    storage = contents.fetch(cache, number, blocks).storage
    for pieces in zip(*storage.values(), strict=True):
        names = (f"block.{at}.{name}" for name in storage)
        yield dict(zip(names, map(np.asarray, pieces), strict=True))


def _choose_snapshots(
    cache: Cache, count: int, builder: SpilledBuilder, gone: dict[int, int]
) -> dict[int, int]:
    """Choose snapshots to spill; return their nodes by id.

    Includes snapshots at the end of spilled blocks (`gone`: hashes by node), then the
    least recently used ones until enough are empty, adding their sequences.
    """
    known = snapshots_of(cache.metadata)
    if known is None:
        return {}
    lengths, last_used, salts, hashes = jax.device_get(
        (known.lengths, known.last_used, known.salts, known.hashes)
    )
    taken = [int(p) for p in np.flatnonzero(lengths)]

    def sequences_at(snapshot_ids: list[int]) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield ids, salts and sequences."""
        rows = _read_rows(known.tokens, np.array(snapshot_ids, np.int32))
        for snapshot_id, row in zip(snapshot_ids, rows, strict=True):
            yield snapshot_id, int(salts[snapshot_id]), row[: lengths[snapshot_id]]

    chosen, proposed = {}, {*gone.values()}
    for snapshot_id, salt, tokens in sequences_at(
        [p for p in taken if hashes[p] in proposed]
    ):
        node = builder.find_sequence(salt, tokens)
        if node in gone:
            chosen[snapshot_id] = node
    num_empty = len(lengths) - len(taken) + len(chosen)
    lacking = min(count, len(lengths) // 2) - num_empty
    if not cache.metadata.block_numbers:
        lacking = count
    oldest = sorted((int(last_used[p]), p) for p in taken if p not in chosen)
    for snapshot_id, salt, tokens in sequences_at(
        [p for _, p in oldest[: max(lacking, 0)]]
    ):
        chosen[snapshot_id] = builder.add_sequence(salt, tokens)
    return chosen
