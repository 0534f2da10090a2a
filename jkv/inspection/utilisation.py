"""fragmentation: utilisation of a pool's blocks."""

from typing import NamedTuple

from jkv.inspection.statistics import num_held_tokens, tally
from jkv.state import Cache
from jkv.state.entry import takes_cache


class Fragmentation(NamedTuple):
    """Waste of a pool in three measures, from `fragmentation`."""

    internal: float  # empty slots of live blocks, over all their slots
    sharing: float  # table entries per live block; 1.0 without sharing
    # Free blocks below the highest live one, over all blocks up to it; the maximum
    # over groups.
    spread: float


@takes_cache(on_host=True)
def fragmentation(cache: Cache) -> Fragmentation:
    """Return the fragmentation of the pool. For the host, outside jit.

    Any free block can be allocated, so a high number does not mean that requests will
    be refused. Blocks and table entries of all groups count together.

    Args:
      cache: a concrete cache.

    Returns:
      A `Fragmentation`; (0.0, 1.0, 0.0) for an empty pool.

      * `internal` is the share of empty slots in live blocks: the cost of reservations,
        and of blocks larger than a token. `compact` cannot lower it.
      * `sharing` is the saving by `fork` and the prefix index: 2.0 means that the
        sequences would need twice the blocks without sharing.
      * `spread` is the share of free blocks from block 0 to the highest live one, the
        maximum over groups. `compact` makes it 0.

    Example:
      Blocks have 4 tokens. Sequence 0 had block 0 and is freed. Sequence 1 has 6 tokens
      in blocks 1 and 2. Its fork shares block 1 and has its last 2 tokens in block 3.
      So 4 of the 12 slots of the 3 live blocks are empty, these blocks have 4 table
      entries, and 1 of the blocks 0 to 3 is free.

      >>> import jkv
      >>> cache, opened = jkv.allocate(jkv.init(jkv.CacheConfig.toy()), [0, 0])
      >>> cache, _ = jkv.append(cache, [0, 1], [4, 6], capacity=10)
      >>> cache, _ = jkv.fork(cache, 1)
      >>> cache, _ = jkv.free(cache, 0)
      >>> [round(number, 3) for number in jkv.fragmentation(cache)]
      [0.333, 1.333, 0.25]
    """
    sums = tally(cache)
    used = [each for each in sums.groups if each.live_blocks]
    live = sum(each.live_blocks for each in used)
    if not live:
        return Fragmentation(0.0, 1.0, 0.0)
    return Fragmentation(
        internal=1 - num_held_tokens(cache, sums) / (live * cache.block_size),
        sharing=sum(each.mapped_blocks for each in used) / live,
        spread=max(1 - each.live_blocks / each.extent for each in used),
    )


@takes_cache(on_host=True)
def should_compact(cache: Cache, threshold: float = 0.3) -> bool:
    """Return True if `spread` exceeds a threshold, so that `compact` helps.

    For the host, outside jit.

    Args:
      cache: a concrete cache.
      threshold: 0 to 1, for the `spread` of `fragmentation`.

    Returns:
      True if `spread` is above `threshold`.

    Raises:
      ValueError: for a threshold outside 0..1.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig.toy())
      >>> cache, _ = jkv.allocate(cache, [12, 4])
      >>> cache, _ = jkv.free(cache, 0)
      >>> jkv.should_compact(cache), jkv.should_compact(cache, threshold=0.8)
      (True, False)
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must lie in 0..1, got {threshold}")
    return fragmentation(cache).spread > threshold
