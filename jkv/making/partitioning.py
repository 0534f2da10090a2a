"""partition_specs: how a cache is to be cut for a mesh."""

import dataclasses
from typing import Any

import jax

from jkv.arguments import explains_arguments
from jkv.config.cache_config import CacheConfig
from jkv.config.grouped_config import GroupedConfig
from jkv.making.initialization import init
from jkv.sharding.storage_sharding import DividedAxes, find_spec
from jkv.state import Cache
from jkv.storage.placement import choose_placements


@explains_arguments
def partition_specs(
    cache: Cache | CacheConfig | GroupedConfig,
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
      A `Cache` with a `PartitionSpec` instead of each array.

    Raises:
      ValueError: if the devices of an axis cannot share the kv heads, or the tokens of
        a block, evenly.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=2, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=16))
      >>> specs = jkv.partition_specs(cache, heads="tp")
      >>> tuple(specs.storage[0].key_pool), tuple(specs.metadata.is_open)
      ((None, None, 'tp'), ())
    """
    if isinstance(cache, Cache):
        shapes, axes = cache, (heads, context)
    else:
        named = {"heads": heads, "context": context, "pools": pools}
        where = choose_placements(cache, None, mesh, **named)
        shapes = jax.eval_shape(lambda: init(cache))
        storage = tuple(
            each.with_sharding(sharding)
            for each, sharding in zip(shapes.storage, where.shardings, strict=True)
        )
        shapes = dataclasses.replace(shapes, storage=storage, pools=where.pools)
        axes = (None, None)  # those that divide something, the storage remembers
    ranks = () if shapes.pools is None else (shapes.pools.axis,)
    whole = jax.sharding.PartitionSpec(*ranks)
    specs: Any = jax.tree.map(lambda _: whole, shapes)
    # All groups that remember some axes remember the same.
    known = next((each.sharding for each in shapes.storage if each.sharding), None)
    if known is not None:
        axes = axes[0] or known.heads, axes[1] or known.context
    storage = tuple(_divide(each, axes, ranks) for each in shapes.storage)
    return specs.with_storage(storage)


def _divide(
    storage: Any, axes: tuple[str | None, str | None], ranks: tuple[str, ...]
) -> Any:
    """Return a group's storage with the partition of each array, by axes, instead."""
    divided = {path: DividedAxes() for path in storage.arrays} | storage.divided
    specs = {
        path: jax.sharding.PartitionSpec(*ranks, *find_spec(of, *axes))
        for path, of in divided.items()
        if path in storage.arrays
    }
    return storage.with_arrays(specs)
