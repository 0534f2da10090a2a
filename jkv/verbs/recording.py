"""record: store token ids that `append` did not know."""

import dataclasses

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.metadata import requests
from jkv.metadata.requests import Integers
from jkv.operations import find_owners, gather, scatter
from jkv.state import Batch, Cache, Metadata
from jkv.state.entry import check_batch, takes_cache


@takes_cache()
def record(cache: Cache, batch: Batch, tokens: Integers) -> Cache:
    """Store the token ids of a step, in place of those passed to `append`.

    For rows whose tokens become known after `append`, such as draft tokens. Call it
    before `commit`, which indexes blocks by their tokens. Caches that record no tokens
    are returned unchanged.

    Args:
      cache: the cache that `append` returned with the batch, or a later one.
      batch: the plan from `append`.
      tokens: i32[R], token ids of the rows, -1 for unknown ones; those of invalid rows
        are ignored.

    Returns:
      The new cache.

    Raises:
      ValueError: for an array of another shape, or a batch of another cache.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig.toy(record_tokens=True)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids, 2, capacity=2)
      >>> cache = jkv.record(cache, batch, jnp.array([7, 8]))
      >>> jkv.tokens(cache, 0)[:3].tolist()
      [7, 8, -1]
    """
    check_batch(cache, batch)
    (given,) = requests.broadcast(tokens=tokens)
    array = jnp.asarray(given)
    expect("tokens", array, "R", {"R": batch.num_rows}, why="one per row of the step")
    if not cache.metadata.records_tokens:
        return cache
    if batch.mask is not None and batch.mask.reads_only:
        return cache  # the rows have no slots
    return cache.with_metadata(_record(cache.metadata, batch, array))


@jax.jit
def _record(metadata: Metadata, batch: Batch, tokens: jax.Array) -> Metadata:
    owner = find_owners(batch.query_starts, 0, batch.num_rows)
    row = jnp.where(
        batch.valid, gather(batch.seq_ids, owner), jnp.int32(metadata.max_sequences)
    )
    past = gather(batch.context_lengths - batch.query_lengths, owner)
    rank = jnp.arange(batch.num_rows, dtype=jnp.int32)
    slot = past + rank - gather(batch.query_starts, owner)
    for number in metadata.block_numbers:
        group = metadata.groups[number]
        if group.tokens is not None:
            block, offset = batch.slots_of(number)
            put = scatter(group.tokens, (block, offset), tokens)
            metadata = metadata.with_group(
                number, dataclasses.replace(group, tokens=put)
            )
    # The tokens of pruned sequences do not determine their keys.
    row = metadata.sequences.pruned.unpruned(row)
    return metadata.index.record(metadata, row, slot, tokens)
