"""Checks of a step's arguments at trace time.

A layer is a number, a batch comes from `append` on this cache, and rows are floats, one
for each row of the batch.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import expect, find_kind, name_kind
from jkv.attention.validation import require_window
from jkv.metadata import requests
from jkv.metadata.requests import Integer
from jkv.metadata.xla_cpu import unknown
from jkv.state import Batch, BlockGroup, BlockStorage, Cache, GroupLayer
from jkv.state.batch import StepSizes
from jkv.status import UsageError


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


def check_dtypes(storage: BlockStorage) -> None:
    """Refuse arrays of another dtype than the stored one, as after a cast."""
    for name, array in storage.arrays.items():
        kept, part = storage.formats.of(name)
        expected = kept.arrays(2)[part].dtype
        if array.dtype != expected:
            raise UsageError(
                f"{name} must have dtype {expected} for {kept.dtype.name}, got "
                f"{array.dtype}; do not cast a cache, create one with "
                f"CacheConfig(dtype=...)"
            )


def check_rows(storage: BlockStorage, batch: Batch, name: str, rows: jax.Array) -> None:
    """Refuse keys or values without one row for each row of the batch."""
    sizes = {
        "R": batch.num_rows,
        "K": storage.num_kv_heads,
        "D": storage.head_dim if name == "key_pool" else storage.value_head_dim,
    }
    called, why = name.replace("_pool", "s"), "one row per row of the batch"
    expect(called, rows, "R K D", sizes, why=why)
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        raise UsageError(
            f"{called} must be floating point, got {rows.dtype}; pass "
            f"{called}.astype(...) to store these numbers"
        )


def check_queries(storage: BlockStorage, batch: Batch, queries: jax.Array) -> None:
    """Refuse queries of a wrong shape or with heads that the mesh cannot divide."""
    sizes = {"R": batch.num_rows}
    sizes = expect("queries", queries, "R H D", sizes, why="R the rows of the batch")
    sharding = storage.sharding
    if sharding is not None and sharding.heads in sharding.open_axes:
        num_heads, num_devices = sizes["H"], sharding.mesh.shape[sharding.heads]
        if num_heads % num_devices:
            raise ValueError(
                f"queries must have a number of heads divisible by the {num_devices} "
                f"devices of mesh axis {sharding.heads!r}, got {num_heads} heads; pass "
                f"init a mesh axis whose size divides the query heads"
            )


def checked_window(
    group: BlockGroup, window: int | jax.Array | None
) -> int | jax.Array | None:
    """Return the window of a call; refuse one larger than the cache's."""
    require_window(window)
    kept = group.window.length
    if kept is None:
        return window
    if isinstance(window, jax.core.Tracer):
        return jnp.minimum(window, kept)
    if window is None or np.any(np.asarray(window) > kept):
        raise UsageError(
            f"window must be at most {kept}, the cache's CacheConfig.sliding_window, "
            f"got {window}; layers with full attention or a larger window need another "
            f"group or cache"
        )
    return window


def any_layer(layer: Integer, batch: Batch) -> jax.Array:
    """Return the layer, i32[], not constant-folded, so that layers share programs."""
    number = requests.as_index(layer)
    is_traced = isinstance(batch.context_lengths, jax.core.Tracer)
    if isinstance(layer, jax.Array) or not is_traced:
        return number
    return unknown(number, batch.context_lengths)
