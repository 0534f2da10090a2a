"""commit: what a step wrote becomes visible to the index."""

from jkv.state import Batch, Cache
from jkv.state.cache import Role
from jkv.state.entry import takes_cache
from jkv.verbs.arguments import check_batch


@takes_cache(role=Role.COMMITS)
def commit(cache: Cache, batch: Batch) -> Cache:
    """Make the blocks that this step filled visible to prefix matching.

    Call it after the last layer's `write`, and before a `fork` of what was written:
    what was not written is found like anything else, and is garbage (`debug` notices).
    A block equal to one that is visible already is given back, and its sequence goes on
    with the other: equal prefixes are stored once. A full block that other sequences
    share before it is visible is not entered unless it has such an equal, from before
    or of an earlier request, as what comes before it may differ among them; its
    sequence then adds no more. Without a prefix index there is nothing to make visible,
    and the cache is returned as it is. With groups of layers the leading one decides:
    the first that sees everything, or else the one that sees furthest. The blocks of
    the others are found beside its own, and are exchanged for equal ones likewise; what
    a window has given back is not found in its group. Of a sequence that the step left
    at a multiple of `StateConfig.snapshot_every`, and that has that length still, the
    states are copied to a place for snapshots, unless its text has one.

    Args:
      cache: the cache that was written.
      batch: the step. Of a sequence freed, cut back or reordered since, nothing becomes
        visible.

    Returns:
      The cache; itself without a prefix index.

    Raises:
      ValueError: for the batch of a cache of other sizes; it may have had another
        number of blocks, before a `resize`.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids)
      >>> jkv.commit(cache, batch) is cache
      True
    """
    # A step that was planned before a `resize` may still be committed.
    check_batch(cache, batch, resized=True)
    metadata, moves = cache.metadata.index.commit(cache.metadata, batch)
    return cache.follow(metadata, moves)
