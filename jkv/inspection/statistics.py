"""stats: counters and occupancy of a cache.

One jitted function sums over blocks and sequences on the device; only its result, some
dozens of words, is transferred to the host.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.state import Cache, Metadata
from jkv.state.entry import takes_cache
from jkv.status import Counter, Status


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupStats:
    """Block statistics of one group of layers; `Stats` has their sums."""

    total_blocks: int  # N
    free_blocks: int  # blocks that can be allocated, cached ones included
    cached_blocks: int  # free blocks in the prefix index
    live_blocks: int  # blocks of open sequences
    shared_blocks: int  # live blocks with a reference count above 1
    pinned_blocks: int  # live blocks in the prefix index, cached once freed
    allocations: int  # blocks that became live
    frees: int  # live blocks that became free
    # most blocks live at one time; after `resize`, of those that still fit
    peak_blocks: int
    evicted_blocks: int  # cached blocks evicted

    @property
    def utilisation(self) -> float:
        """Live share of the pool, 0.0 for an empty one."""
        return self.live_blocks / max(self.total_blocks, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats(GroupStats):
    """Statistics of a cache, Python ints; `str` formats them as a table.

    Block fields are those of `GroupStats`, summed over groups. Fields from
    `allocations` on count events since `init`, as do the fields here except for live
    sequences, tokens and snapshots, which are current.
    """

    live_sequences: int  # open rows of the block tables
    max_sequences: int  # S
    tokens: int  # sum of the context lengths; a shared token counts once per owner

    refusals: dict[Status, int]  # refused requests, by cause
    evicted_sequences: int  # closed by `evict`
    prefix_queries: int  # prompts looked up
    prefix_tokens: int  # tokens of these prompts
    prefix_hits: int  # tokens found in the cache
    compactions: int  # calls of `compact`, and resizes that renumber blocks
    last_compaction: int | None  # clock of the last one; None without one
    clock: int  # calls that served a request

    groups: tuple[GroupStats, ...]  # groups that have blocks
    snapshots: int = 0  # cached snapshots of recurrent states
    max_snapshots: int = 0  # capacity for snapshots, of all groups

    @property
    def hit_rate(self) -> float:
        """Share of looked-up tokens that were found, 0.0 before any lookup."""
        return self.prefix_hits / max(self.prefix_tokens, 1)

    def __str__(self) -> str:
        refused = ", ".join(
            f"{number:,} {status.name}"
            for status, number in self.refusals.items()
            if number
        )
        last = "" if self.last_compaction is None else f", at {self.last_compaction:,}"
        return "\n".join(
            [
                f"blocks      {self.live_blocks:,} of {self.total_blocks:,} live "
                f"({self.utilisation:.0%}), {self.shared_blocks:,} of them shared, "
                f"{self.pinned_blocks:,} pinned",
                f"            {self.free_blocks:,} free, "
                f"{self.cached_blocks:,} of them cached; "
                f"at the peak {self.peak_blocks:,} live",
                *self._list_groups(),
                f"sequences   {self.live_sequences:,} of {self.max_sequences:,} live, "
                f"{self.tokens:,} tokens",
                *[f"snapshots   {self.snapshots:,} of {self.max_snapshots:,}"]
                * bool(self.max_snapshots),
                f"allocated   {self.allocations:,} blocks, freed {self.frees:,}",
                f"refused     {refused or 'nothing'}",
                f"evicted     {self.evicted_sequences:,} sequences, "
                f"{self.evicted_blocks:,} cached blocks",
                f"prefixes    {self.prefix_queries:,} queries, {self.prefix_hits:,} of "
                f"{self.prefix_tokens:,} tokens found ({self.hit_rate:.0%})",
                f"compacted   {self.compactions:,} times{last}",
                f"clock       {self.clock:,}",
            ]
        )

    def _list_groups(self) -> list[str]:
        """Return one line per group, if there are several."""
        if len(self.groups) < 2:
            return []
        return [
            f"  group {i:<4} {group.live_blocks:,} of {group.total_blocks:,} live "
            f"({group.utilisation:.0%}), {group.cached_blocks:,} cached, at the peak "
            f"{group.peak_blocks:,} live"
            for i, group in enumerate(self.groups)
        ]


class GroupTally(NamedTuple):
    """Sums over the metadata of one group, as Python ints."""

    live_blocks: int
    shared_blocks: int
    cached_blocks: int
    pinned_blocks: int
    mapped_blocks: int  # table entries; a shared block counts once per owner
    released: int  # table entries released by a window
    extent: int  # 1 + the highest live block id; 0 without one
    free_blocks: int
    fewest_free: int
    num_taken: int
    num_forgotten: int


class Tally(NamedTuple):
    """Sums over the metadata of a cache, as Python ints."""

    groups: tuple[GroupTally, ...]
    live_sequences: int
    tokens: int
    snapshots: int
    counters: list[int]


@takes_cache(on_host=True)
def stats(cache: Cache) -> Stats:
    """Return counters and occupancy of the cache. For the host, outside jit.

    It transfers less than 300 bytes, independent of the cache's size, and some 90 more
    for each further group of layers.

    Args:
      cache: a concrete cache.

    Returns:
      A `Stats`.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig.toy(num_blocks=4, max_sequences=2)
      >>> cache, opened = jkv.allocate(jkv.init(config), [9, 5])
      >>> stats = jkv.stats(cache)
      >>> stats.live_blocks, stats.free_blocks, stats.utilisation
      (3, 1, 0.75)
      >>> stats.refusals[jkv.Status.OUT_OF_BLOCKS]
      1
    """
    sums = tally(cache)
    count = {counter.name: sums.counters[counter] for counter in Counter}
    compactions = count["COMPACTIONS"]
    pairs = zip(cache.metadata.block_groups, sums.groups, strict=True)
    groups = tuple(_describe(group.num_blocks, each) for group, each in pairs)
    names = [field.name for field in dataclasses.fields(GroupStats)]
    return Stats(
        **{name: sum(getattr(each, name) for each in groups) for name in names},
        live_sequences=sums.live_sequences,
        max_sequences=cache.max_sequences,
        tokens=sums.tokens,
        refusals={s: sums.counters[s] for s in Status if s != Status.OK},
        evicted_sequences=count["SEQUENCES_EVICTED"],
        prefix_queries=count["PREFIX_QUERIES"],
        prefix_tokens=count["PREFIX_TOKENS"],
        prefix_hits=count["PREFIX_HITS"],
        compactions=compactions,
        last_compaction=count["LAST_COMPACTION"] if compactions else None,
        clock=count["CLOCK"],
        groups=groups,
        snapshots=sums.snapshots,
        max_snapshots=cache.metadata.index.num_snapshots,
    )


def _describe(num_blocks: int, sums: GroupTally) -> GroupStats:
    return GroupStats(
        total_blocks=num_blocks,
        free_blocks=sums.free_blocks,
        cached_blocks=sums.cached_blocks,
        live_blocks=sums.live_blocks,
        shared_blocks=sums.shared_blocks,
        pinned_blocks=sums.pinned_blocks,
        allocations=sums.num_taken,
        # Every allocated block is either live or was freed.
        frees=sums.num_taken - sums.live_blocks,
        peak_blocks=num_blocks - sums.fewest_free,
        evicted_blocks=sums.num_forgotten,
    )


def tally(cache: Cache) -> Tally:
    """Return the sums over a cache's metadata in one transfer."""
    words = jax.device_get(_sums(cache.metadata)).tolist()
    numbers = iter([low + (high << 32) for low, high in words])
    groups = tuple(
        GroupTally(*itertools.islice(numbers, len(GroupTally._fields)))
        for _ in cache.metadata.block_numbers
    )
    live_sequences, tokens, snapshots, *counters = numbers
    return Tally(groups, live_sequences, tokens, snapshots, counters)


def num_held_tokens(cache: Cache, sums: Tally) -> int:
    """Return the number of live slots with a token, over all groups.

    A shared slot counts once. A block with empty slots has one owner, so the empty
    slots of different sequences are distinct.
    """
    size = cache.block_size
    return sum(
        each.live_blocks * size
        - ((each.mapped_blocks + each.released) * size - sums.tokens)
        for each in sums.groups
    )


@jax.jit
def _sums(metadata: Metadata) -> jax.Array:
    """Return the numbers of a `Tally`, u32[..., 2], low word first."""
    groups = [_sum_group(metadata, i) for i in metadata.block_numbers]
    own = [
        _as_words(_count_true(metadata.is_open)),
        _wide_sum(metadata.context_lengths),
        _as_words(metadata.index.count_snapshots()),
    ]
    return jnp.concatenate([*groups, jnp.stack(own), metadata.sequences.counters])


def _sum_group(metadata: Metadata, number: int) -> jax.Array:
    """Return the numbers of a `GroupTally`, u32[..., 2]."""
    group = metadata.groups[number]
    ring, live = group.free_blocks, group.reference_counts > 0
    block = jnp.arange(group.num_blocks, dtype=jnp.int32)
    known = metadata.index.knows(metadata, number, block)
    # At most S * M; the configuration keeps it below 2**30.
    mapped = jnp.sum(group.num_mapped_blocks, dtype=jnp.int32)
    kept = jnp.sum(group.num_kept_blocks, dtype=jnp.int32)
    sums = [
        _count_true(live),
        _count_true(group.reference_counts > 1),
        _count_true(known & ~live),
        _count_true(known & live),
        kept,
        mapped - kept,
        jnp.max(jnp.where(live, block + 1, 0)),
        ring.count,
        ring.fewest,
    ]
    return jnp.stack([*map(_as_words, sums), ring.num_taken, ring.num_forgotten])


def _as_words(number: jax.Array) -> jax.Array:
    return jnp.stack([number.astype(jnp.uint32), jnp.uint32(0)])


def _count_true(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.int32)


def _wide_sum(lengths: jax.Array) -> jax.Array:
    """Return the sum of lengths, i32[S], as u32[2]: low word, high word."""
    zero = np.uint32(0)
    low = lengths.astype(jnp.uint32)

    def add(
        a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        total = a[0] + b[0]
        return total, a[1] + b[1] + (total < a[0]).astype(jnp.uint32)

    words = jax.lax.reduce((low, jnp.zeros_like(low)), (zero, zero), add, (0,))
    return jnp.stack(words)
