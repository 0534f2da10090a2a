"""over_pools: verbs on a cache that has a pool for each rank of a mesh axis."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jkv.sharding.heads import without_copies_of_heads
from jkv.sharding.processes import bring_whole
from jkv.sharding.ranks import PoolSharding, with_rank, without_rank
from jkv.sharding.storage_sharding import POOL_HEADS
from jkv.state import BlockStorage, Cache
from jkv.status import UsageError
from jkv.storage.placement import put


def over_pools(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs on each rank's pools, with each rank's arguments.

    Nothing crosses between ranks: block ids and sequence ids are those of the rank.
    Jit a step of it and donate the cache, as ever.

    Args:
      function: `function(cache, *arguments)` for one pool, such as a verb or a step;
        arguments and what it returns are pytrees of arrays and caches.

    Returns:
      The same for a cache of `init(..., pools=...)`, and for arrays with an axis of
      ranks before their own.

    Raises:
      ValueError: when it is called with a cache that has no pools.

    Example:
      >>> import jax, jkv, numpy as np
      >>> mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16)
      >>> cache = jkv.init(config, mesh=mesh, pools="dp")
      >>> cache, opened = jkv.over_pools(jkv.allocate)(cache, np.array([[0, 16]]))
      >>> opened.seq_ids.tolist()
      [[0, 1]]
    """

    def on_rank(divided: tuple[Any, ...], pools: PoolSharding) -> Any:
        cache, *arguments = without_rank(divided)
        answer = function(enter_pool(cache), *arguments)
        return with_rank(leave_pool(answer, pools))

    @jax.jit
    def on_ranks(cache: Cache, *arguments: Any) -> Any:
        pools = cache.pools
        if pools is None:
            raise UsageError(
                "over_pools is for a cache with a pool for each rank, of init(config, "
                "mesh=mesh, pools=axis); call verbs on other caches directly"
            )
        ranks = jax.sharding.PartitionSpec(pools.axis)
        return pools.map(
            lambda divided, _: on_rank(divided, pools),
            (cache, *arguments),
            (),
            out_specs=ranks,
        )

    return on_ranks


def enter_pool(cache: Cache) -> Cache:
    """Return the cache of one rank, which knows of no other."""
    return dataclasses.replace(cache, pools=None)


def leave_pool(answer: Any, pools: PoolSharding) -> Any:
    """Return what a rank answers, its caches as those of one rank among others."""

    def leave(part: Any) -> Any:
        is_cache = isinstance(part, Cache)
        return dataclasses.replace(part, pools=pools) if is_cache else part

    return jax.tree.map(leave, answer, is_leaf=lambda part: isinstance(part, Cache))


def split_pools(cache: Cache) -> list[Cache]:
    """Return the pool of each rank as a cache of its own. For the host, outside jit.

    They are copies: what the host does with `check`, `stats` and `save`, and what is
    left of a mesh when it is taken down. Where ranks are on other processes, all of
    them call it, and each gets the pools of all.

    Args:
      cache: with a pool for each rank.

    Returns:
      The caches in the order of ranks, each on JAX's default device.

    Raises:
      ValueError: for a cache that has no pools.

    Example:
      >>> import jax, jkv
      >>> mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16)
      >>> cache = jkv.init(config, mesh=mesh, pools="dp")
      >>> [jkv.stats(pool).free_blocks for pool in jkv.split_pools(cache)]
      [4]
    """
    if not isinstance(cache, Cache) or cache.pools is None:
        raise UsageError("split_pools is for a cache with a pool for each rank")
    ranks = range(cache.pools.num_ranks)
    arrays = jax.tree.map(bring_whole, dataclasses.replace(cache, pools=None))
    arrays = arrays.with_storage(tuple(map(_without_mesh, arrays.storage)))
    return [
        put(jax.tree.map(lambda array, rank=rank: array[rank], arrays), None)
        for rank in ranks
    ]


def _without_mesh(storage: BlockStorage) -> BlockStorage:
    """Return a group's keys and values with each head once, on no mesh."""
    arrays = {
        name: without_copies_of_heads(storage.sharding, pool, POOL_HEADS + 1)
        for name, pool in storage.arrays.items()
    }
    return dataclasses.replace(storage.with_arrays(arrays), sharding=None)
