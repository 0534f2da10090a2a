"""commit: add the blocks that a step filled to the prefix index."""

import dataclasses

import jax.numpy as jnp

from jkv.masks import StepMask
from jkv.state import Batch, Cache
from jkv.state.cache import Role
from jkv.state.entry import takes_cache
from jkv.verbs.arguments import check_batch


@takes_cache(role=Role.COMMITS)
def commit(cache: Cache, batch: Batch) -> Cache:
    """Add the blocks that this step filled to the prefix index.

    Call it after the last layer's `write`, and before a `fork` of the written tokens:
    blocks committed without a write are found like any others and hold garbage (`debug`
    reports it). Without a prefix index the cache is returned unchanged.

    A block equal to an indexed one is released, and its sequence maps the indexed one:
    equal prefixes are stored once. A full block that is already shared but not indexed
    is indexed only if an equal block is, from an earlier step or request, as the
    prefixes of its sequences may differ; otherwise its sequence commits no further
    blocks.

    With several groups of layers the leading group decides: the first with full
    attention, or the one with the largest window. Blocks of the other groups are found
    with the leader's and are deduplicated in the same way, except blocks outside their
    window.

    If the step left a sequence at a multiple of `StateConfig.snapshot_every`, and it
    still has that length, its states are copied to a snapshot, unless one exists for
    its tokens.

    Args:
      cache: the cache after `write`.
      batch: the step. Sequences freed, truncated or reordered since then commit
        nothing. Nor do requests with a row that attends to a later row, now and in
        later steps, as their keys depend on more than the tokens before them; except
        spans that are `cacheable`.

    Returns:
      The new cache; the same object without a prefix index.

    Raises:
      ValueError: if the batch belongs to a cache of other sizes; the number of blocks
        may differ, after a `resize`.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids)
      >>> jkv.commit(cache, batch) is cache
      True
    """
    # A step planned before a `resize` may still be committed.
    check_batch(cache, batch, resized=True)
    if batch.mask is not None:
        if batch.mask.reads_only:
            return cache
        batch = _without_private(batch, batch.mask)
    metadata, moves = cache.metadata.index.commit(cache.metadata, batch)
    return cache.follow(metadata, moves)


def _without_private(batch: Batch, mask: StepMask) -> Batch:
    """Return the step without the requests that the prefix index must not hold.

    Their later steps do not continue indexed tokens, so they are not indexed either.
    """
    lengths = jnp.where(mask.is_private, 0, batch.query_lengths)
    return dataclasses.replace(batch, query_lengths=lengths, mask=None)
