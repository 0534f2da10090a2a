"""What verbs of a step check of their arguments, all of it known when they are traced.

A layer is a number, a batch is one that `append` planned on this cache, rows are floats
and one for each row of the batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.metadata import requests
from jkv.metadata.requests import Integer
from jkv.metadata.xla_cpu import unknown
from jkv.state import Batch, Cache
from jkv.state.batch import StepSizes
from jkv.status import UsageError

# What a batch was planned by; the other sizes are the storage's.
_PLANNED_BY = ("num_blocks", "block_size", "max_sequences", "max_context_length")


def check_layer(cache: Cache, layer: Integer) -> None:
    """Reject a layer that is known not to exist; a traced one cannot be checked."""
    if cache.num_layers == 0:
        raise ValueError(
            "this cache has no storage (init(..., storage=False)); make one with "
            "storage to write, read or attend"
        )
    if isinstance(layer, int | np.integer):
        if not 0 <= layer < cache.num_layers:
            raise ValueError(
                f"layer must be in 0..{cache.num_layers - 1}, got {int(layer)}"
            )
        return
    kind = _array_kind(layer)
    if kind is None or kind[1] or not jnp.issubdtype(kind[0], jnp.integer):
        raise UsageError(f"layer must be an int or i32[], got {name_kind(layer)}")


def check_batch(cache: Cache, batch: Batch, *, ignored: str | None = None) -> None:
    """Reject what is no batch, or the batch of a cache of other sizes.

    Args:
      cache: the cache that the batch is used with.
      batch: the step.
      ignored: a size that may differ.
    """
    if not isinstance(batch, Batch):
        raise UsageError(
            f"batch must be the jkv.Batch that append returned, got {name_kind(batch)}"
        )
    if batch.sizes != cache.sizes:
        _compare_sizes(batch.sizes, cache.sizes, ignored)


def _compare_sizes(planned: StepSizes, found: StepSizes, ignored: str | None) -> None:
    """Raise if sizes differ in what must agree."""
    names = set(_PLANNED_BY)
    # A rank inside shard_map sees its part of the storage, a plan without storage none.
    if planned.num_layers and not jax.sharding.get_abstract_mesh().manual_axes:
        names |= set(StepSizes._fields)
    differing = [
        f"{name} {before} there and {now} here"
        for name, before, now in zip(StepSizes._fields, planned, found, strict=True)
        if before != now and name in names and name != ignored
    ]
    if differing:
        raise ValueError(
            f"this batch was planned by append on another cache: "
            f"{', '.join(differing)}; append to the cache that the batch is used with, "
            f"and use each batch with its own"
        )


def check_rows(cache: Cache, batch: Batch, name: str, rows: jax.Array) -> None:
    """Reject rows of "keys" or "values" that are not one for each row of the batch."""
    width = cache.storage[name].shape[4]
    expected = (batch.num_rows, cache.num_kv_heads, width)
    kind = _array_kind(rows)
    if kind is None or kind[1] != expected:
        raise UsageError(
            f"{name} must have shape [R, K, D] = {list(expected)}, one row per row "
            f"of the batch, got {name_kind(rows)}"
        )
    if not jnp.issubdtype(kind[0], jnp.floating):
        raise UsageError(
            f"{name} must be floating point, got {kind[0]}; convert them with "
            f"{name}.astype(...) if these numbers are what shall be stored"
        )


def check_queries(cache: Cache, batch: Batch, queries: jax.Array) -> None:
    """Reject queries that are not one for each row, or that a mesh cannot share."""
    kind = _array_kind(queries)
    if kind is None or len(kind[1]) != 3 or kind[1][0] != batch.num_rows:
        raise UsageError(
            f"queries must have shape [R, H, D] with R = {batch.num_rows}, the rows of "
            f"the batch, got {name_kind(queries)}"
        )
    sharding = cache.sharding
    if sharding is not None and sharding.heads in sharding.open_axes:
        num_heads, num_devices = kind[1][1], sharding.mesh.shape[sharding.heads]
        if num_heads % num_devices:
            raise ValueError(
                f"{num_heads} query heads cannot be shared evenly by the {num_devices} "
                f"devices of mesh axis {sharding.heads!r}, over which init spread this "
                f"cache's heads; use an axis whose size divides the query heads"
            )


def checked_window(
    cache: Cache, window: int | jax.Array | None
) -> int | jax.Array | None:
    """Return the window of a call; refuse one that would look at what is gone."""
    kept = cache.metadata.window
    if kept is None:
        return window
    if isinstance(window, jax.core.Tracer):
        return jnp.minimum(window, kept.length)
    if window is None or np.any(np.asarray(window) > kept.length):
        raise UsageError(
            f"this cache keeps the last {kept.length} tokens of a sequence "
            f"(CacheConfig.sliding_window), so attend needs window= of at most that, "
            f"got {window}; layers that see more need a cache without a window"
        )
    return window


def any_layer(layer: Integer, batch: Batch) -> jax.Array:
    """Return the layer, i32[], so that programs for different ones are alike."""
    number = requests.as_index(layer)
    is_traced = isinstance(batch.context_lengths, jax.core.Tracer)
    if isinstance(layer, jax.Array) or not is_traced:
        return number
    return unknown(number, batch.context_lengths)


def name_kind(value: Any) -> str:
    """Say what an argument is: an array by dtype and shape, else by its type."""
    kind = _array_kind(value)
    return type(value).__name__ if kind is None else f"{kind[0]}{list(kind[1])}"


def _array_kind(value: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Return the dtype and shape of an array, None of anything else."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return value.dtype, value.shape
    return None
