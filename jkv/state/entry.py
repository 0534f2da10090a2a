"""Argument checks of public functions: the cache, a layer, a batch; explanations.

A valid call costs a few comparisons. The rest happens on failure: `_explain` inspects
the cache that the function got. A layer is a number, and a batch comes from `append` on
this cache.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import (
    as_index,
    explain,
    explains_arguments,
    explicit_transfers,
    find_kind,
    for_second_call,
    name_kind,
)
from jkv.operations import unknown
from jkv.sharding.storage_sharding import PoolSharding
from jkv.signatures import Integer, with_signature
from jkv.state.batch import Batch, StepSizes
from jkv.state.cache import Cache, GroupLayer, Role
from jkv.status import CacheError, UsageError

Params = ParamSpec("Params")
Result = TypeVar("Result")


def takes_cache(
    *,
    argument: int = 0,
    on_host: bool = False,
    any_pools: bool = False,
    role: Role | None = None,
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Decorate a public function with a parameter `cache` to check and explain it.

    Other values than a cache are refused. If the function fails on a donated cache, the
    error says so. An interceptor of the cache runs the function.

    Args:
      argument: position of the parameter `cache` among the function's.
      on_host: True if the function reads values, and refuses a traced cache.
      any_pools: True if it accepts a cache with several pools.
      role: its effect, for interceptors.
    """

    def decorate(function: Callable[Params, Result]) -> Callable[Params, Result]:
        @functools.wraps(function)
        def entered(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            cache = args[argument] if len(args) > argument else kwargs.get("cache")
            if type(cache) is not Cache:
                return _enter_without(function, cache, args, kwargs)
            if on_host:
                _refuse_traced(function, cache)
            if cache.pools is not None and not any_pools:
                is_on_host = on_host or role is Role.SETS_DEBUG
                _refuse_pools(function, cache.pools, argument, is_on_host)
            try:
                if cache.interceptor is not None:
                    return cache.interceptor.call(function, cache, (args, kwargs), role)
                return function(*args, **kwargs)
            except Exception as error:
                again = for_second_call(args, kwargs, error)
                if again is None:
                    _explain(function, cache, error)
                    explain(function, args, kwargs, error)
                    raise
            with explicit_transfers():
                return entered(*again[0], **again[1])

        return with_signature(entered, function)

    return decorate


def _enter_without(
    function: Callable[..., Result],
    cache: object,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Result:
    """Call a function that needs no cache here, or refuse the value passed."""
    signature = inspect.signature(function)
    # Raises Python's own error for missing or extra arguments.
    if "cache" not in signature.bind(*args, **kwargs).arguments:
        return explains_arguments(function)(*args, **kwargs)
    _refuse_cache(function, signature, cache)


def _refuse_traced(function: Callable[..., Any], cache: Cache) -> None:
    """Refuse a cache inside jit."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(cache)):
        raise UsageError(
            f"{function.__name__} reads values on the host, got a traced cache; call "
            f"it outside jit; inside, check batch.status"
        )


def _refuse_pools(
    function: Callable[..., Any], pools: PoolSharding, argument: int, on_host: bool
) -> NoReturn:
    """Raise with the way to call the function on several pools."""
    name = function.__name__
    given = (
        "(arguments by position have an axis of ranks first, keyword arguments are the "
        "same for all)"
    )
    if on_host:
        advice = (
            f"jkv.split_pools(cache) returns a copy of each for the host, which {name} "
            f"takes; changes to a copy do not affect this cache"
        )
    elif argument:
        advice = (
            f"call it in a step whose first argument is the cache, and "
            f"jkv.over_pools(step)(cache, prompts, params=params) calls that on all of "
            f"them {given}"
        )
    else:
        advice = (
            f"jkv.over_pools({name})(cache, ...) calls it on all of them {given}, or "
            f"jkv.over_pools(step) a step that calls it"
        )
    raise UsageError(
        f"{name} works on one pool, and this cache has one for each rank of mesh axis "
        f"{pools.axis!r}: {advice}"
    )


def _refuse_cache(
    function: Callable[..., Any], signature: inspect.Signature, cache: object
) -> NoReturn:
    """Raise for a value that is not a cache."""
    name = function.__name__
    if isinstance(cache, tuple) and cache and isinstance(cache[0], Cache):
        raise UsageError(
            f"{name}: cache must be a jkv.Cache, got a pair; verbs return a pair, so "
            f"unpack it, as in `cache, result = jkv.allocate(cache, ...)`"
        )
    advice = ""
    if type(cache).__name__ in ("CacheConfig", "GroupedConfig"):
        advice = "; jkv.init(config) creates a cache of a configuration"
    order = ", ".join(signature.parameters)
    raise UsageError(
        f"{name}: cache must be a jkv.Cache, got {type(cache).__name__}; the order is "
        f"{name}({order}){advice}"
    )


def _explain(function: Callable[..., Any], cache: Cache, error: Exception) -> None:
    """Raise a better error if the cache explains the failure."""
    if isinstance(error, UsageError | CacheError):
        return
    if _was_donated(cache):
        raise UsageError(
            f"{function.__name__}: cache was donated to an earlier call, which "
            f"took its arrays; use the cache that the call returned, as in "
            f"`cache, ... = step(cache, ...)`"
        ) from error
    *shape, _ = jnp.shape(cache.metadata.sequences.rows)
    if cache.pools is None and len(shape) != 1:
        raise UsageError(
            f"{function.__name__}: the arrays of cache have leading axes "
            f"{list(shape[:-1])}, as in a stack of caches; call "
            f"it under jax.vmap, or create one cache with init(..., pools=)"
        ) from error


def _was_donated(cache: Cache) -> bool:
    """Return True if an array of the cache is deleted."""
    return any(
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and leaf.is_deleted()
        for leaf in jax.tree.leaves(cache)
    )


def locate_layer(cache: Cache, layer: Integer | GroupLayer) -> GroupLayer:
    """Return the group and index of a layer; refuse layers outside the model."""
    if cache.num_layers == 0:
        raise ValueError(
            "this cache has no storage (init(..., storage=False)); create one with "
            "storage to write, read or attend"
        )
    if isinstance(layer, tuple):
        layer = cache.find_layer(layer)
    number = layer.layer if isinstance(layer, GroupLayer) else layer
    if isinstance(number, int | np.integer):
        known = len(cache.layer_groups)
        if isinstance(layer, GroupLayer):
            known = cache.storage[layer.group].num_layers
        if not 0 <= number < known:
            raise UsageError(f"layer must be in 0..{known - 1}, got {int(number)}")
    else:
        kind = find_kind(number)
        if kind is None or kind[1] or not jnp.issubdtype(kind[0], jnp.integer):
            raise UsageError(f"layer must be an int or i32[], got {name_kind(number)}")
    return cache.find_layer(layer)


def check_batch(cache: Cache, batch: Batch, *, resized: bool = False) -> None:
    """Refuse other types, and batches of caches of other sizes unless resized."""
    if not isinstance(batch, Batch):
        raise UsageError(
            f"batch must be the jkv.Batch that append returned, got {name_kind(batch)}"
        )
    if batch.sizes != cache.sizes:
        _compare_sizes(batch.sizes, cache.sizes, resized)


def _compare_sizes(planned: StepSizes, found: StepSizes, resized: bool) -> None:
    """Raise if sizes that must agree differ."""
    if len(planned.groups) != len(found.groups):
        raise ValueError(
            f"this batch was planned by append on another cache, of "
            f"{len(planned.groups)} groups of layers, got a cache of "
            f"{len(found.groups)}; use each batch with its own cache"
        )
    there, here = (_named_sizes(each) for each in (planned, found))
    # A rank inside shard_map has a part of the storage; a plan may have none.
    is_whole = not jax.sharding.get_abstract_mesh().manual_axes
    has_layers = any(group.num_layers for group in planned.groups)
    of_storage = "num_layers", "num_kv_heads", "head_dim", "value_head_dim"
    differing = [
        f"{name} {there.get(name)} there and {here.get(name)} here"
        for name in there | here
        if there.get(name) != here.get(name)
        and not (resized and name.endswith("num_blocks"))
        and (is_whole and has_layers or not name.endswith(of_storage))
    ]
    if differing:
        raise ValueError(
            f"this batch was planned by append on another cache: "
            f"{', '.join(differing)}; append to the cache that the batch is used with"
        )


def _named_sizes(sizes: StepSizes) -> dict[str, int]:
    """Return all sizes by name, prefixed by the group's number if there are several."""
    named = {name: n for name, n in sizes._asdict().items() if name != "groups"}
    for i, group in enumerate(sizes.groups):
        prefix = f"group {i} " if len(sizes.groups) > 1 else ""
        named |= {f"{prefix}{name}": n for name, n in group._asdict().items()}
    return named


def any_layer(layer: Integer, batch: Batch) -> jax.Array:
    """Return the layer, i32[], not constant-folded, so that layers share programs."""
    number = as_index(layer)
    is_traced = isinstance(batch.context_lengths, jax.core.Tracer)
    if isinstance(layer, jax.Array) or not is_traced:
        return number
    return unknown(number, batch.context_lengths)
