"""partition_specs: how a cache is to be cut for a mesh."""

import dataclasses
from typing import Any

import jax

from jkv.config.cache_config import CacheConfig
from jkv.sharding.storage_sharding import POOL, find_spec
from jkv.state import Cache
from jkv.status import UsageError
from jkv.storage.placement import choose_placements
from jkv.verbs.initialization import init


def partition_specs(
    cache: Cache | CacheConfig,
    *,
    mesh: jax.sharding.Mesh | None = None,
    heads: str | None = None,
    context: str | None = None,
    pools: str | None = None,
) -> Cache:
    """Return a `PartitionSpec` for each array of a cache, in the cache's own structure.

    It is what `jax.shard_map` takes as `in_specs` and `out_specs`, and what a
    `NamedSharding` for `jax.jit` or `jax.device_put` is made of.

    Args:
      cache: the cache; or the configuration of one, with the `mesh` given to `init`.
      mesh: only with a configuration.
      heads: the mesh axis over which the kv heads of keys and values are spread;
        default that of the cache, None of a cache that remembers none.
      context: the mesh axis over which the tokens of each block are spread, likewise.
      pools: only with a configuration: the mesh axis of which each rank has a pool.

    Returns:
      A `Cache` with a `PartitionSpec` in the place of each array.

    Raises:
      ValueError: if the devices of an axis cannot share the kv heads, or the tokens of
        a block, evenly; for a cache of another kind, with groups or in debug mode.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=2, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16))
      >>> specs = jkv.partition_specs(cache, heads="tp")
      >>> tuple(specs.keys), tuple(specs.metadata.block_tables)
      ((None, None, 'tp'), ())
    """
    if isinstance(cache, Cache):
        if type(cache) is not Cache:
            raise UsageError(
                f"partition_specs takes a plain cache, got {type(cache).__name__}: "
                f"give it each of cache.groups, or jkv.debug(cache, False)"
            )
        shapes = cache
    else:
        axes = {"heads": heads, "context": context, "pools": pools}
        where = choose_placements(cache, None, mesh, **axes)
        shapes = jax.eval_shape(lambda: init(cache))
        shapes = dataclasses.replace(shapes, sharding=where.sharding, pools=where.pools)
        heads = context = None  # an axis of one device divides nothing
    if shapes.sharding is not None:
        heads = heads or shapes.sharding.heads
        context = context or shapes.sharding.context
    ranks = () if shapes.pools is None else (shapes.pools.axis,)
    specs: Any = jax.tree.map(lambda _: jax.sharding.PartitionSpec(*ranks), shapes)
    within = find_spec(POOL, heads, context)
    of_pools = jax.sharding.PartitionSpec(*ranks, *within)
    return specs.with_storage(dict.fromkeys(shapes.storage, of_pools))  # type: ignore[no-any-return]
