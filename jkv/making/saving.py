"""save and load: a whole cache, or some of its sequences, as one file.

A whole cache is written and read layer by layer: the host never holds a second copy of
the pool. Sequences are gathered on the host first, as `swap_out` does.
"""

import dataclasses
import os
from typing import Any, overload

import jax
import numpy as np

from jkv.arguments import explains_arguments
from jkv.inspection.invariants import check
from jkv.making.kinds import KINDS, with_parts
from jkv.metadata.requests import Integers
from jkv.state import Cache
from jkv.state.entry import takes_cache
from jkv.status import InvariantError, UsageError
from jkv.storage import saved
from jkv.storage.files import FileError, Path
from jkv.storage.placement import (
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
    """Write a cache, or some of its sequences, to one file. For the host, outside jit.

    The file has the safetensors format and is written whole or not at all: under
    another name first, then renamed in place of whatever is at `path`. Progress is
    logged under the name "jkv".

    A cache on devices of several processes is saved by all of them: each calls this,
    one writes, and all return when the file is complete. A cache with several groups of
    layers, or several pools, is one file; one in debug mode is saved as a plain one.

    Args:
      path: the file.
      cache: the cache, which stays as it is.
      seq_ids: i32[B] or int, sequences to save, as for `swap_out`; -1 is padding.
        Default: the whole cache to the last bit, its prefix index and its clock too.

    Raises:
      InvalidSequence: for an id that is not open or is named twice; nothing is written.
      OSError: if the file cannot be written; what was at `path` stays.

    Example:
      >>> import jkv, pathlib, tempfile
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
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
            "seq_ids name sequences of one pool, and this cache has several: save one "
            "of jkv.split_pools(cache), or leave seq_ids out to save all"
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
    """Read what `save` wrote. For the host, outside jit.

    With a path alone, return the whole cache as it was saved, to the last bit. With a
    cache, open the file's sequences in it as `swap_in` does, all or none: those that
    were named, in that order, or all that were open in a whole cache, by ascending id.

    The file is verified before anything is made of it.

    Args:
      path: the file.
      cache: where its sequences go; without it the file must hold a whole cache.
      device: where a whole cache's arrays go, a device or a sharding as for `init`.
      mesh: the devices instead, as for `init`, whatever devices the file was written
        from. If they belong to several processes, all of them call this, and each can
        read the file.
      heads: the mesh's axis for the kv heads, as for `init`.
      context: the mesh's axis for the tokens of a block, as for `init`.
      pools: the mesh's axis of ranks, for a file with a pool for each, as for `init`.
      donate: as for `swap_in`.

    Returns:
      The cache; or, given one, the new cache and a `SwapIn`.

    Raises:
      FileError: if the file is foreign, truncated, damaged or of another version.
      OSError: if it cannot be read.
      ValueError: if it holds sequences and no cache is given, the cache given has other
        groups of layers, another shape or dtype, or the file has another number of
        pools than the axis.

    Example:
      >>> import jkv, pathlib, tempfile
      >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
      ...     num_blocks=4, max_sequences=2, max_context_length=64)
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
        # All is read from the file before this returns.
        return jax.block_until_ready(swap_in(cache, value, donate=donate))
    if isinstance(value, Swapped):
        raise ValueError(
            f"{os.fspath(path)} holds {value.num_sequences} sequences, not a whole "
            f"cache; load(path, cache) opens them in a cache"
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
    return jax.block_until_ready(loaded)


def _put_storage(storage: Any, where: Placements, number: int) -> Any:
    """Put the storage of a group, of numpy arrays, on its devices."""
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
    """Refuse a file whose caches break an invariant, or are not as many as asked."""
    has_ranks = cache.metadata.sequences.rows.ndim == 3
    found = len(cache.metadata.sequences.rows) if has_ranks else None
    wanted = mesh.shape.get(pools) if mesh is not None and pools else None
    if found != wanted:
        holds = f"{found} pools" if has_ranks else "one pool, without ranks"
        raise ValueError(
            f"{os.fspath(path)} holds {holds}; load it with pools= of a mesh axis of "
            f"as many ranks, or with none if it has none"
        )
    try:
        for rank in range(found or 0):
            check(jax.tree.map(lambda array, rank=rank: array[rank], cache))
        if found is None:
            check(cache)
    except (LookupError, TypeError, ValueError, InvariantError) as error:
        raise FileError(path, f"is damaged: {error}") from error
