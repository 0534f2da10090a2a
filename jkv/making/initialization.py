"""init: a fresh cache. partition_specs: the sharding of its arrays over a mesh."""

import dataclasses
import warnings
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import explains_arguments
from jkv.blocks.part import Blocks
from jkv.blocks.swapped import SwappedGroup
from jkv.config.cache_config import CacheConfig
from jkv.config.counts import ArrayLayout
from jkv.config.grouped_config import GroupedConfig, as_grouped
from jkv.config.layout import AnySizes, lay_out
from jkv.config.state_config import StateConfig
from jkv.formats.table import format_cost
from jkv.metadata.observations import Observations
from jkv.metadata.positions import Positions
from jkv.prefixes.index import PrefixIndex
from jkv.sharding.storage_sharding import (
    DividedAxes,
    copies_of,
    find_spec,
    with_full_spec,
)
from jkv.state import BlockGroup, BlockStorage, Cache, NoIndex, States, StateStorage
from jkv.states.part import OfStates
from jkv.states.swapped import SwappedStates
from jkv.status import UsageError
from jkv.storage.leaves import Placement, Placements, build, choose_placements, put

# Candidate classes of fields with an abstract type, by path (`jkv.storage.leaves`).
KINDS: dict[str, tuple[type, ...]] = {
    "metadata.index": (NoIndex, PrefixIndex),
    "metadata.groups": (BlockGroup, States),
    "storage": (BlockStorage, StateStorage),
    "groups": (SwappedGroup, SwappedStates),
}
PARTS: dict[type, Any] = {BlockGroup: Blocks, States: OfStates}


def with_parts(cache: Cache) -> Cache:
    """Return a cache with the parts of its groups, which implement the verbs."""
    numbers: dict[type, tuple[int, ...]] = {}
    for number, group in enumerate(cache.metadata.groups):
        numbers[type(group)] = (*numbers.get(type(group), ()), number)
    parts = [part for kind, of in numbers.items() for part in PARTS[kind].of(of)]
    if cache.metadata.sequences.pruned.is_there:
        parts.append(Positions())
    if any(group.observed.width for group in cache.metadata.block_groups):
        parts.append(Observations())
    metadata = dataclasses.replace(cache.metadata, parts=tuple(parts))
    return cache.with_metadata(metadata)


@explains_arguments
def init(
    config: CacheConfig | StateConfig | GroupedConfig,
    *,
    storage: bool = True,
    device: Placement = None,
    mesh: jax.sharding.Mesh | None = None,
    heads: str | None = None,
    context: str | None = None,
    pools: str | None = None,
) -> Cache:
    """Return a fresh cache: every block free, no sequence open.

    Args:
      config: the sizes; a `GroupedConfig` for models with several kinds of layers.
      storage: if False, the arrays of keys and values are empty (zero layers): the same
        verbs run on the metadata alone, to simulate or test a schedule.
      device: a device or a sharding for the arrays; default JAX's choice.
      mesh: devices of the cache, instead of `device`. The cache stores it, so the verbs
        work with and without `jax.set_mesh`.
      heads: mesh axis that shards the kv heads of keys and values; everything else, and
        everything if None, is replicated. With more devices on the axis than kv heads,
        each head is replicated.
      context: mesh axis that shards the tokens of each block, so that a sequence is on
        all of its devices, and each attends to its part. The block size must be a
        multiple of its size.
      pools: mesh axis with a pool of these sizes and its metadata on each rank:
        `generate` distributes prompts over the ranks, `over_pools` maps verbs over
        them.

    Returns:
      A `Cache`. Free blocks and sequence ids are in the order 0, 1, 2, ... Warns if
      keys are in int4, which costs accuracy.

    Raises:
      ValueError: if an axis cannot shard the kv heads, or the tokens of a block,
        evenly, or for conflicting arguments.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig(
      ...     num_layers=2, num_kv_heads=1, head_dim=8, num_blocks=4,
      ...     max_sequences=2, max_context_length=16), storage=False)
      >>> int(jkv.num_free_blocks(cache)), cache.storage[0].key_pool.size
      (4, 0)

      A model with three sliding-window layers and one with full attention:

      >>> config = jkv.GroupedConfig.for_context_length(
      ...     4096, max_sequences=2, layer_windows=[64, 64, None, 64], num_kv_heads=1,
      ...     head_dim=8, step_tokens=32)
      >>> cache = jkv.init(config)
      >>> [group.num_blocks for group in cache.metadata.groups], cache.find_layer(3)
      ([512, 18], GroupLayer(group=1, layer=2))
    """
    if not isinstance(config, CacheConfig | StateConfig | GroupedConfig):
        raise UsageError(
            f"config must be a jkv.CacheConfig or a jkv.GroupedConfig, got "
            f"{type(config).__name__}; create one with jkv.CacheConfig(num_layers=...)"
        )
    groups = as_grouped(config)
    axes = {"heads": heads, "context": context, "pools": pools}
    where = choose_placements(groups, device, mesh, **axes)
    sizes = groups.sizes
    if not storage:
        sizes = tuple(each._replace(num_layers=0) for each in sizes)
    arrays = _make_arrays(sizes, groups.prefix_caching, where)
    constants: dict[str, Any] = {
        "layer_groups": groups.groups_of_layers,
        "pools": where.pools,
        "metadata.sequences.max_context_length": groups.max_context_length,
        "metadata.sequences.block_size": groups.block_size,
        "metadata.parts": (),
    }
    for i, each in enumerate(sizes):
        for part, named in each.constants.items():
            constants |= {f"{part}.{i}.{name}": value for name, value in named.items()}
    if groups.prefix_caching and groups.state_groups:
        every = groups.state_groups[0].snapshot_every
        constants["metadata.index.snapshots.every"] = every
    cache = with_parts(build(Cache, arrays | constants, KINDS))
    pairs = zip(cache.storage, where.shardings, strict=True)
    cache = cache.with_storage(tuple(each.with_sharding(of) for each, of in pairs))
    if mesh is not None:
        cache = jax.tree.map(with_full_spec, cache)
    _warn_of_short_keys(cache)
    return cache


def _warn_of_short_keys(cache: Cache) -> None:
    """Warn about the accuracy of int4 keys, unless the cache is traced."""
    for each in cache.block_storage:
        is_traced = isinstance(each.key_pool, jax.core.Tracer)
        if each.dtype == jnp.int4 and each.num_layers and not is_traced:
            warnings.warn(
                f"keys in int4 cost perplexity ({format_cost('int4', 'int4')}), "
                f"CacheConfig(dtype='int8', value_dtype='int4') less "
                f"({format_cost('int8', 'int4')}); measure your model with "
                "jkv.measure_formats",
                stacklevel=4,
            )


def _make_arrays(
    sizes: tuple[AnySizes, ...], prefix_caching: bool, where: Placements
) -> dict[str, jax.Array]:
    """Create all arrays of a cache with their placements, by path."""
    # A pool has several copies of each head if the mesh axis exceeds the heads.
    stored = tuple(
        each.with_copies(copies_of(sharding))
        for each, sharding in zip(sizes, where.shardings, strict=True)
    )
    ranks = () if where.pools is None else (where.pools.num_ranks,)
    places = {
        f"storage.{i}.{path}": where.of(i, path)
        for i, each in enumerate(stored)
        for path in each.lay_out_storage(prefix_caching)
    }
    arrays = lay_out(stored, prefix_caching)
    storage = {
        path: jnp.zeros(
            (*ranks, *arrays[path].shape), arrays[path].dtype, device=device
        )
        for path, device in places.items()
    }
    # Under jit, numpy arrays would become constants of the program.
    traced = any(isinstance(pool, jax.core.Tracer) for pool in storage.values())
    numpy = jnp if traced else np
    metadata: Any = {
        path: numpy.broadcast_to(_fill(array, numpy), (*ranks, *array.shape))
        for path, array in arrays.items()
        if path not in storage
    }
    put_all = jax.device_put if traced else put
    return put_all(metadata, where.metadata) | storage


def _fill(array: ArrayLayout, numpy: ModuleType) -> Any:
    """Return the initial value of an array, in numpy or `jax.numpy`."""
    if isinstance(array.fill, range):
        return numpy.arange(len(array.fill), dtype=array.dtype)
    return numpy.broadcast_to(numpy.asarray(array.fill, array.dtype), array.shape)


@explains_arguments
def partition_specs(
    cache: Cache | CacheConfig | GroupedConfig,
    *,
    mesh: jax.sharding.Mesh | None = None,
    heads: str | None = None,
    context: str | None = None,
    pools: str | None = None,
) -> Cache:
    """Return a `Cache` with a `PartitionSpec` for each array.

    The result is accepted by `jax.shard_map` as `in_specs` and `out_specs`, and gives
    the `NamedSharding`s for `jax.jit` or `jax.device_put`.

    Args:
      cache: a cache; or a configuration, with the `mesh` passed to `init`.
      mesh: only with a configuration.
      heads: mesh axis that shards the kv heads of keys and values; default the cache's
        own, or None.
      context: mesh axis that shards the tokens of each block, likewise.
      pools: only with a configuration: mesh axis with a pool on each rank.

    Returns:
      A `Cache` with a `PartitionSpec` instead of each array.

    Raises:
      ValueError: if an axis cannot shard the kv heads, or the tokens of a block,
        evenly.

    Example:
      >>> import jkv
      >>> cache = jkv.init(jkv.CacheConfig.toy(num_kv_heads=2))
      >>> specs = jkv.partition_specs(cache, heads="tp")
      >>> tuple(specs.storage[0].key_pool), tuple(specs.metadata.sequences.rows)
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
        axes = (None, None)  # the storage has the effective axes
    ranks = () if shapes.pools is None else (shapes.pools.axis,)
    whole = jax.sharding.PartitionSpec(*ranks)
    specs: Any = jax.tree.map(lambda _: whole, shapes)
    # All groups with axes have the same ones.
    known = next((each.sharding for each in shapes.storage if each.sharding), None)
    if known is not None:
        axes = axes[0] or known.heads, axes[1] or known.context
    storage = tuple(_divide(each, axes, ranks) for each in shapes.storage)
    return specs.with_storage(storage)


def _divide(
    storage: Any, axes: tuple[str | None, str | None], ranks: tuple[str, ...]
) -> Any:
    """Return a group's storage with `PartitionSpec`s instead of arrays."""
    divided = {path: DividedAxes() for path in storage.arrays} | storage.divided
    specs = {
        path: jax.sharding.PartitionSpec(*ranks, *find_spec(of, *axes))
        for path, of in divided.items()
        if path in storage.arrays
    }
    return storage.with_arrays(specs)
