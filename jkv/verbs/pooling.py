"""over_pools: verbs on a cache with a pool for each rank of a mesh axis."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np

from jkv.arguments import explains_arguments
from jkv.sharding.processes import bring_whole
from jkv.sharding.storage_sharding import (
    POOL_HEADS,
    PoolSharding,
    with_rank,
    without_copies_of_heads,
    without_rank,
)
from jkv.state import Cache
from jkv.status import UsageError
from jkv.storage.leaves import put


@explains_arguments
def over_pools(function: Callable[..., Any]) -> Callable[..., Any]:
    """Map a function over the pools, with each rank's arguments.

    Ranks do not communicate: block ids and sequence ids are local to a rank. Jit the
    step and donate the cache, as usual.

    Args:
      function: `function(cache, *arguments, **whole)` for one pool, such as a verb or a
        step; its arguments and result are pytrees of arrays and caches. Wrap
        functions with the cache in another position (`beam_search`, `extend`) in a
        step.

    Returns:
      The same function for a cache of `init(..., pools=...)`. Positional arguments and
      results are arrays with a leading axis of ranks. Keyword arguments are the same
      for all ranks: arrays, such as weights on the mesh, are passed whole; other values
      (Python numbers, strings, functions) are static. Arrays in the closure of a step
      become constants, which cannot live on the mesh.

    Raises:
      ValueError: when called with a cache without pools, a positional argument without
        an axis of ranks, or a keyword argument that is neither an array nor hashable.

    Example:
      >>> import jax, jkv, numpy as np
      >>> mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> cache = jkv.init(jkv.CacheConfig.toy(), mesh=mesh, pools="dp")
      >>> cache, opened = jkv.over_pools(jkv.allocate)(cache, np.array([[0, 16]]))
      >>> opened.seq_ids.tolist()
      [[0, 1]]
      >>> cache, batch = jkv.over_pools(jkv.append)(
      ...     cache, opened.seq_ids, np.array([[5, 3]]), capacity=8)
      >>> batch.positions.tolist()
      [[0, 1, 2, 3, 4, 0, 1, 2]]
    """

    @functools.partial(jax.jit, static_argnums=3)
    def on_ranks(
        cache: Cache,
        arguments: tuple[Any, ...],
        whole: list[jax.Array],
        keywords: _Keywords,
    ) -> Any:
        pools = cache.pools
        assert pools is not None

        def on_rank(divided: Any, whole: list[jax.Array]) -> Any:
            cache, *arguments = without_rank(divided)
            answer = function(enter_pool(cache), *arguments, **keywords.join(whole))
            return with_rank(leave_pool(answer, pools))

        ranks = jax.sharding.PartitionSpec(pools.axis)
        return pools.map(on_rank, (cache, *arguments), whole, out_specs=ranks)

    @functools.wraps(function)
    def called(cache: Cache, *arguments: Any, **whole: Any) -> Any:
        if not isinstance(cache, Cache) or cache.pools is None:
            raise UsageError(
                "over_pools needs a cache with a pool for each rank, from init(config, "
                "mesh=mesh, pools=axis); call verbs on other caches directly"
            )
        _check_ranks(arguments, cache.pools)
        keywords, arrays = _Keywords.of(whole)
        return on_ranks(cache, arguments, arrays, keywords)

    return called


class _Keywords(NamedTuple):
    """Keyword arguments without their arrays; hashable."""

    structure: Any  # tree of the arguments by name
    others: tuple[Any, ...]  # by leaf: the value or None, and True for arrays

    @classmethod
    def of(cls, whole: dict[str, Any]) -> "tuple[_Keywords, list[Any]]":
        """Split keyword arguments into a hashable rest and a list of arrays."""
        for name, value in whole.items():
            for leaf in jax.tree.leaves(value):
                if not _is_array(leaf) and not isinstance(leaf, Hashable):
                    raise UsageError(
                        f"{name} holds a {type(leaf).__name__}, neither an array nor "
                        f"hashable; keyword arguments are arrays or static"
                    )
        leaves, structure = jax.tree.flatten(whole)
        others = tuple((None, True) if _is_array(x) else (x, False) for x in leaves)
        return cls(structure, others), [leaf for leaf in leaves if _is_array(leaf)]

    def join(self, arrays: list[jax.Array]) -> dict[str, Any]:
        """Return the keyword arguments with their arrays."""
        rest = iter(arrays)
        leaves = [next(rest) if is_array else x for x, is_array in self.others]
        return jax.tree.unflatten(self.structure, leaves)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _check_ranks(arguments: tuple[Any, ...], pools: PoolSharding) -> None:
    """Refuse positional arguments without a leading axis of ranks."""
    for position, argument in enumerate(arguments, start=1):
        for leaf in jax.tree.leaves(argument):
            shape = np.shape(leaf)
            if not shape or shape[0] != pools.num_ranks:
                raise UsageError(
                    f"over_pools: argument {position} has an array of shape "
                    f"{list(shape)}, whose first axis must be the {pools.num_ranks} "
                    f"ranks of mesh axis {pools.axis!r}; pass values common to all "
                    f"ranks by keyword"
                )


def enter_pool(cache: Cache) -> Cache:
    """Return the cache of one rank, without pools."""
    return dataclasses.replace(cache, pools=None)


def leave_pool(answer: Any, pools: PoolSharding) -> Any:
    """Mark the caches in a rank's result as one of several pools."""

    def leave(part: Any) -> Any:
        is_cache = isinstance(part, Cache)
        return dataclasses.replace(part, pools=pools) if is_cache else part

    return jax.tree.map(leave, answer, is_leaf=lambda part: isinstance(part, Cache))


@explains_arguments
def split_pools(cache: Cache) -> list[Cache]:
    """Return the pool of each rank as a cache of its own. For the host, outside jit.

    The caches are copies, for `check`, `stats` and `save` on the host, or for use after
    the mesh is gone. In multi-process runs every process calls it, and each gets all
    pools.

    Args:
      cache: a cache with a pool for each rank.

    Returns:
      The caches in the order of ranks, each on JAX's default device.

    Raises:
      ValueError: if the cache has no pools.

    Example:
      >>> import jax, jkv
      >>> mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> cache = jkv.init(jkv.CacheConfig.toy(), mesh=mesh, pools="dp")
      >>> [jkv.stats(pool).free_blocks for pool in jkv.split_pools(cache)]
      [8]
    """
    if not isinstance(cache, Cache) or cache.pools is None:
        raise UsageError("split_pools needs a cache with a pool for each rank")
    ranks = range(cache.pools.num_ranks)
    arrays = jax.tree.map(bring_whole, dataclasses.replace(cache, pools=None))
    for number, storage in enumerate(arrays.storage):  # each head once, on no mesh
        pools = {
            name: without_copies_of_heads(storage.sharding, pool, POOL_HEADS + 1)
            for name, pool in storage.arrays.items()
        }
        storage = storage.with_arrays(pools).with_sharding(None)
        arrays = arrays.with_group_storage(number, storage)
    return [
        put(jax.tree.map(lambda array, rank=rank: array[rank], arrays), None)
        for rank in ranks
    ]
