"""save and load: a whole cache, or some of its sequences, as one file.

A whole cache is written and read layer by layer: the host never holds a second copy of
the pool. Sequences are gathered on the host first, as by `swap_out`.
"""

import dataclasses
import os
from typing import Any, overload

import jax
import numpy as np

from jkv.arguments import explains_arguments
from jkv.inspection.invariants import check
from jkv.making.initialization import KINDS, with_parts
from jkv.metadata.requests import Integers
from jkv.sharding.storage_sharding import with_full_spec
from jkv.state import Cache
from jkv.state.entry import takes_cache
from jkv.status import InvariantError, UsageError
from jkv.storage import saved
from jkv.storage.files import FileError, Path
from jkv.storage.leaves import (
    Placement,
    Placements,
    choose_placements,
    put,
    put_by_layers,
)
from jkv.storage.swapped import Swapped, copy_out
from jkv.verbs.swapping import SwapIn, swap_in


@takes_cache(argument=1, on_host=True, any_pools=True)
def save(path: Path, cache: Cache, seq_ids: Integers | None = None) -> None:
    """Write a cache, or some of its sequences, to one file. Call it outside jit.

    The file has the safetensors format and is written atomically: under a temporary
    name, then renamed to `path`. Progress is logged under the name "jkv".

    For a cache sharded over several processes, all of them call this; one writes, and
    all return when the file is complete. A cache with several groups of layers, or
    several pools, is one file; the debug mode is not saved.

    Args:
      path: the file.
      cache: the cache, unchanged.
      seq_ids: i32[B] or int, sequences to save, as for `swap_out`; -1 is padding.
        Default: the whole cache, bit-identical, with its prefix index and clock.

    Raises:
      InvalidSequence: for an id that is not open or is repeated; nothing is written.
      OSError: if writing fails; an existing file at `path` is unchanged.

    Example:
      >>> import jkv, pathlib, tempfile
      >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=4, max_sequences=2,
      ...     max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [64])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "cache.safetensors")
      ...     jkv.save(path, cache)
      ...     loaded = jkv.load(path)
      >>> int(jkv.num_free_blocks(loaded)), loaded.metadata.is_open.tolist()
      (0, [True, False])
    """
    if seq_ids is not None and cache.pools is not None:
        raise UsageError(
            "seq_ids is not supported for a cache with several pools; save one of "
            "jkv.split_pools(cache), or omit seq_ids to save all"
        )
    value = cache if seq_ids is None else copy_out(cache, seq_ids)
    saved.write_value(path, value)


@overload
def load(
    path: Path,
    cache: None = None,
    *,
    device: Placement = None,
    mesh: jax.sharding.Mesh | None = None,
    heads: str | None = None,
    context: str | None = None,
    pools: str | None = None,
) -> Cache: ...


@overload
def load(path: Path, cache: Cache, *, donate: bool = False) -> tuple[Cache, SwapIn]: ...


@explains_arguments
def load(
    path: Path,
    cache: Cache | None = None,
    *,
    device: Placement = None,
    mesh: jax.sharding.Mesh | None = None,
    heads: str | None = None,
    context: str | None = None,
    pools: str | None = None,
    donate: bool = False,
) -> Cache | tuple[Cache, SwapIn]:
    """Read a file of `save`. Call it on the host, outside jit.

    With a path only, return the whole cache, bit-identical. With a cache, open the
    file's sequences in it as `swap_in` does, all or none: the saved ones in their
    order, or of a whole cache all open ones by ascending id.

    The file is verified first.

    Args:
      path: the file.
      cache: destination of the sequences; without it the file must have a whole cache.
      device: device or sharding of a whole cache, as for `init`.
      mesh: devices instead, as for `init`, independent of the devices at saving. If
        they belong to several processes, all of them call this, and each reads the
        file.
      heads: mesh axis of the kv heads, as for `init`.
      context: mesh axis of the tokens of a block, as for `init`.
      pools: mesh axis of ranks, for a file with a pool for each, as for `init`.
      donate: as for `swap_in`.

    Returns:
      The cache; or, with `cache`, the new cache and a `SwapIn`.

    Raises:
      FileError: if the file is foreign, truncated, damaged or of another version.
      OSError: if the file cannot be read.
      ValueError: if the file has sequences and `cache` is missing, if `cache` has other
        groups of layers, shapes or dtypes, or if the number of pools differs from the
        axis.

    Example:
      >>> import jkv, pathlib, tempfile
      >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=4, max_sequences=2,
      ...     max_context_length=64)
      >>> cache, opened = jkv.allocate(jkv.init(config), [64])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "sequence.safetensors")
      ...     jkv.save(path, cache, opened.seq_ids)
      ...     cache, back = jkv.load(path, jkv.init(config))
      >>> back.seq_ids.tolist(), int(jkv.num_free_blocks(cache))
      ([0], 0)
    """
    value = saved.read_value(path, KINDS)
    if isinstance(value, Cache):
        value = with_parts(value)
        _check_saved(path, value, mesh, pools)
    if cache is not None:
        if isinstance(value, Cache):
            value = copy_out(value, np.flatnonzero(value.metadata.is_open))
        # The file is memory-mapped until the copies have finished.
        return jax.block_until_ready(swap_in(cache, value, donate=donate))
    if isinstance(value, Swapped):
        raise ValueError(
            f"path must have a whole cache, got {value.num_sequences} sequences in "
            f"{os.fspath(path)}; use load(path, cache) to open them in a cache"
        )
    axes = {"heads": heads, "context": context, "pools": pools}
    where = choose_placements(_first_pool(value), device, mesh, **axes)
    loaded = dataclasses.replace(
        value,
        storage=tuple(
            _put_storage(group, where, number)
            for number, group in enumerate(value.storage)
        ),
        metadata=put(value.metadata, where.metadata),
        pools=where.pools,
    )
    return jax.block_until_ready(jax.tree.map(with_full_spec, loaded))


def _put_storage(storage: Any, where: Placements, number: int) -> Any:
    """Copy a group's storage of numpy arrays to its devices."""
    arrays = {
        path: put_by_layers(np.asarray(array), where, number, path)
        for path, array in storage.arrays.items()
    }
    return storage.with_arrays(arrays).with_sharding(where.shardings[number])


def _first_pool(cache: Cache) -> Cache:
    """Return the pool of the first rank of a file's cache, or the only one."""
    has_ranks = cache.metadata.sequences.rows.ndim == 3
    return jax.tree.map(lambda array: array[0], cache) if has_ranks else cache


def _check_saved(
    path: Path, cache: Cache, mesh: jax.sharding.Mesh | None, pools: str | None
) -> None:
    """Raise if a cache breaks an invariant, or the number of pools is unexpected."""
    has_ranks = cache.metadata.sequences.rows.ndim == 3
    found = len(cache.metadata.sequences.rows) if has_ranks else None
    wanted = mesh.shape.get(pools) if mesh is not None and pools else None
    if found != wanted:
        holds = f"{found} pools" if has_ranks else "one pool, without ranks"
        raise ValueError(
            f"pools must be a mesh axis of as many ranks as the file has pools, or "
            f"None for one without ranks; {os.fspath(path)} has {holds}"
        )
    try:
        for rank in range(found or 0):
            check(jax.tree.map(lambda array, rank=rank: array[rank], cache))
        if found is None:
            check(cache)
    except (LookupError, TypeError, ValueError, InvariantError) as error:
        raise FileError(path, f"is damaged: {error}") from error
