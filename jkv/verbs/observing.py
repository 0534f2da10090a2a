"""observe, read_queries: the newest queries of each sequence, for scoring rules."""

import jax
import jax.numpy as jnp

from jkv.arguments import expect
from jkv.metadata import requests
from jkv.metadata.requests import Integer, Integers
from jkv.operations import gather
from jkv.sharding.storage_sharding import update_in_place
from jkv.state import Batch, Cache, GroupLayer, ObservedQueries
from jkv.state.cache import Role
from jkv.state.entry import any_layer, check_batch, locate_layer, takes_cache
from jkv.state.observed import Observed
from jkv.status import UsageError
from jkv.verbs.attending import check_queries


@takes_cache(role=Role.OBSERVES)
def observe(
    cache: Cache, layer: Integer | GroupLayer, batch: Batch, queries: jax.Array
) -> Cache:
    """Store the queries of a step's newest rows, for rules such as `press.snap_kv`.

    A cache keeps the last `CacheConfig(observed_queries=W)` queries of each sequence,
    by position: a chunk replaces older ones, a fork has its parent's, and queries past
    a truncation are lost, all of them in `prune(rotate=)`. Tokens of a prefix cache hit
    and of `swap_in` are not observed. The same cache is returned without
    `observed_queries`, in layers with a sliding window, and for a batch that only reads
    or has a tree mask, so that a model may always call it.

    Args:
      cache: the cache that `append` returned with the batch, or a later one.
      layer: i32[] or int; may be traced.
      batch: the plan from `append`.
      queries: [R, H, D], any float dtype, as passed to `attend`: rotated.

    Returns:
      The new cache. Under jit with donation the queries are stored in place.

    Raises:
      ValueError: if queries have the wrong shape, or the batch belongs to a cache of
        other sizes.

    Example:
      >>> import jax.numpy as jnp, jkv
      >>> config = jkv.CacheConfig.toy(observed_queries=2)
      >>> cache, opened = jkv.allocate(jkv.init(config), [0])
      >>> cache, batch = jkv.append(cache, opened.seq_ids, 3, capacity=3)
      >>> queries = jnp.arange(3.0)[:, None, None] * jnp.ones((3, 1, 8))
      >>> cache = jkv.observe(cache, 0, batch, queries)
      >>> found, num = jkv.read_queries(cache, 0, opened.seq_ids)
      >>> found[0, :, 0, 0].tolist(), int(num[0])
      ([1.0, 2.0], 2)
    """
    found = locate_layer(cache, layer)
    check_batch(cache, batch)
    check_queries(cache.storage[found.group], batch, queries)
    observed = cache.metadata.groups[found.group].observed
    if not isinstance(observed, ObservedQueries):
        return cache
    _check(observed, batch, queries)
    if batch.mask is not None and (batch.mask.reads_only or batch.mask.is_tree):
        return cache
    # Rows that the same step overwrites would collide in the ring.
    ends = batch.query_starts + batch.query_lengths
    row = jnp.arange(batch.num_rows, dtype=jnp.int32)
    lane = jnp.sum(row[:, None] >= batch.query_starts[None], axis=1) - 1
    lane = jnp.maximum(lane, 0)
    is_newest = batch.valid & (row >= ends[lane] - observed.width)
    seq_id = jnp.where(is_newest, batch.seq_ids[lane], cache.max_sequences)
    at = any_layer(found.layer, batch)
    observed = update_in_place(
        ObservedQueries.written, observed, at, seq_id, batch.positions, queries
    )
    return cache.with_metadata(cache.metadata.changed(found.group, observed=observed))


@takes_cache()
def read_queries(
    cache: Cache, layer: Integer | GroupLayer, seq_ids: Integers
) -> Observed:
    """Return the newest queries of sequences, as the rules of `jkv.press` take them.

    Args:
      cache: a cache with `CacheConfig(observed_queries=W)`.
      layer: i32[] or int; may be traced.
      seq_ids: i32[B] or int.

    Returns:
      `queries`, f32[B, W, H, D], newest last, zeros before the first one; and `num`,
      i32[B], the queries of the newest tokens that were observed without a gap.

    Raises:
      ValueError: if the layer observes no queries.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig.toy(observed_queries=4))
      >>> cache, opened = jkv.allocate(cache, [0])
      >>> jkv.read_queries(cache, 0, opened.seq_ids).num.tolist()  # none yet
      [0]
    """
    found = locate_layer(cache, layer)
    observed = cache.metadata.groups[found.group].observed
    if not isinstance(observed, ObservedQueries):
        raise UsageError(
            "layer must have observed queries; create the cache with "
            "CacheConfig(observed_queries=...), which layers with a sliding window "
            "ignore"
        )
    (ids,) = requests.broadcast(seq_ids=seq_ids)
    sequences = cache.metadata.sequences
    lengths = gather(sequences.context_lengths, ids)
    ends = sequences.pruned.positions_of(ids, lengths)
    return observed.read(found.layer, ids, ends)


def _check(observed: ObservedQueries, batch: Batch, queries: jax.Array) -> None:
    """Refuse queries of another shape than the stored ones."""
    sizes = {"R": batch.num_rows, "H": observed.num_heads}
    sizes["D"] = observed.queries.shape[-1]
    why = "H and D as in CacheConfig(num_query_heads=, head_dim=)"
    expect("queries", queries, "R H D", sizes, why=why)
