"""stats: what a cache holds, and what happened to it.

One jitted function makes the sums over blocks and sequences on the device. Its result,
some dozens of words, is all that is transferred to the host.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.state import Cache, Metadata
from jkv.state.entry import for_host
from jkv.status import Counter, Status


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """A cache in numbers, Python ints of any size. `str` makes a table of them.

    The first fields are the state of now, where a block is free or live. From
    `allocations` on they count what happened since `init`.
    """

    total_blocks: int  # N
    free_blocks: int  # reference count 0, cached ones included: what can be handed out
    cached_blocks: int  # of the free ones, those the prefix index still finds
    live_blocks: int  # named by an open sequence's table
    shared_blocks: int  # of the live ones, those with several owners
    pinned_blocks: int  # of the live ones, those indexed: cached, were they let go
    live_sequences: int  # open rows of the block tables
    max_sequences: int  # S
    tokens: int  # sum of the context lengths; a shared token counts for each owner

    allocations: int  # blocks that became live
    frees: int  # live blocks that became free
    peak_blocks: int  # most blocks live at one time; after a `resize`, that still fit
    refusals: dict[Status, int]  # requests refused, by cause
    evicted_sequences: int  # closed by `evict`
    evicted_blocks: int  # cached blocks that lost their contents
    prefix_queries: int  # prompts looked up
    prefix_tokens: int  # their tokens
    prefix_hits: int  # of these tokens, those found
    compactions: int  # calls of `compact`, and resizes that renumber
    last_compaction: int | None  # clock of the last one; None: there was none
    clock: int  # calls that served a request

    @property
    def utilisation(self) -> float:
        """Share of the pool that is live, 0.0 for an empty one."""
        return self.live_blocks / self.total_blocks

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked up that were found, 0.0 before any look-up."""
        return self.prefix_hits / max(self.prefix_tokens, 1)

    def __str__(self) -> str:
        """Say it in a few aligned lines."""
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
                f"sequences   {self.live_sequences:,} of {self.max_sequences:,} live, "
                f"{self.tokens:,} tokens",
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


class Tally(NamedTuple):
    """Sums over the metadata of a cache, as Python ints."""

    live_blocks: int
    shared_blocks: int
    cached_blocks: int
    pinned_blocks: int
    live_sequences: int
    mapped_blocks: int  # table entries: a shared block counts for each owner
    given_back: int  # table entries that a window has given back
    extent: int  # 1 + the highest live block id, 0 if there is none
    free_blocks: int
    fewest_free: int
    tokens: int
    counters: list[int]


@for_host
def stats(cache: Cache) -> Stats:
    """Return what the cache holds and what happened to it. For the host, outside jit.

    It takes one transfer of less than 300 bytes, whatever the size of the cache.

    Args:
      cache: a concrete cache.

    Returns:
      A `Stats`.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, block_size=4, max_sequences=2, max_context_length=16)
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
    return Stats(
        total_blocks=cache.num_blocks,
        free_blocks=sums.free_blocks,
        cached_blocks=sums.cached_blocks,
        live_blocks=sums.live_blocks,
        shared_blocks=sums.shared_blocks,
        pinned_blocks=sums.pinned_blocks,
        live_sequences=sums.live_sequences,
        max_sequences=cache.max_sequences,
        tokens=sums.tokens,
        allocations=count["BLOCKS_TAKEN"],
        # Every block taken is live still or was freed.
        frees=count["BLOCKS_TAKEN"] - sums.live_blocks,
        peak_blocks=cache.num_blocks - sums.fewest_free,
        refusals={s: sums.counters[s] for s in Status if s != Status.OK},
        evicted_sequences=count["SEQUENCES_EVICTED"],
        evicted_blocks=count["BLOCKS_EVICTED"],
        prefix_queries=count["PREFIX_QUERIES"],
        prefix_tokens=count["PREFIX_TOKENS"],
        prefix_hits=count["PREFIX_HITS"],
        compactions=compactions,
        last_compaction=count["LAST_COMPACTION"] if compactions else None,
        clock=count["CLOCK"],
    )


def tally(cache: Cache) -> Tally:
    """Return the sums over a cache's metadata, by one transfer."""
    words = jax.device_get(_sums(cache.metadata)).tolist()
    # Counts that fit a word each, then pairs of words: the tokens and the counters.
    narrow = Tally._fields[:-2]
    pairs = zip(words[len(narrow) :: 2], words[len(narrow) + 1 :: 2], strict=True)
    tokens, *counters = [low + (high << 32) for low, high in pairs]
    return Tally(
        **dict(zip(narrow, words, strict=False)), tokens=tokens, counters=counters
    )


def num_held_tokens(cache: Cache, sums: Tally) -> int:
    """Return how many slots of live blocks hold a token; a shared one counts once.

    A block with a slot to spare has one owner, so the spare slots of all sequences are
    all different.
    """
    entries = sums.mapped_blocks + sums.given_back
    spare = entries * cache.block_size - sums.tokens
    return sums.live_blocks * cache.block_size - spare


@jax.jit
def _sums(metadata: Metadata) -> jax.Array:
    """Return the words of a `Tally`, u32[...], one array to make it one transfer."""
    counts = metadata.reference_counts
    live = counts > 0
    indexed = jnp.zeros_like(live)
    if metadata.prefix is not None:
        indexed = metadata.prefix.hashes != 0
    given_back = jnp.int32(0)
    if metadata.window is not None:
        given_back = jnp.sum(metadata.window.num_given_back, dtype=jnp.int32)
    ends = jnp.arange(1, metadata.num_blocks + 1, dtype=jnp.int32)
    words = [
        _count_true(live),
        _count_true(counts > 1),
        _count_true(indexed & ~live),
        _count_true(indexed & live),
        _count_true(metadata.is_open),
        # At most S * M, which the configuration keeps below 2**30.
        jnp.sum(metadata.num_mapped_blocks, dtype=jnp.int32) - given_back,
        given_back,
        jnp.max(jnp.where(live, ends, 0)),
        metadata.free_blocks.count,
        metadata.free_blocks.fewest,
    ]
    return jnp.concatenate(
        [
            jnp.stack(words).astype(jnp.uint32),
            _wide_sum(metadata.context_lengths),
            metadata.counters.reshape(-1),
        ]
    )


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
