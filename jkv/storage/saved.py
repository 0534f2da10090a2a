"""Serialization of a cache, or of sequences on the host, to one file.

Arrays are named by the path of their fields (`jkv.storage.leaves`); static fields are
in the header, in JSON. Keys and values stored as the bits of another dtype have that
dtype in the file.
"""

import collections
import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jkv.blocks import contents
from jkv.blocks.contents import HostArray
from jkv.formats.format import STORED_AS
from jkv.sharding.processes import agree, bring_whole, is_writer
from jkv.sharding.storage_sharding import (
    POOL_HEADS,
    as_auto,
    copies_of,
    is_shared,
    without_copies_of_heads,
)
from jkv.state import Cache
from jkv.storage import files
from jkv.storage.files import FileError, Path, Tensor
from jkv.storage.leaves import Kinds, build, list_leaves
from jkv.storage.swapped import Swapped

# Content of a file, by the name in its header; "pools" has a leading axis of ranks.
_KINDS: dict[str, type[Cache] | type[Swapped]] = {
    "cache": Cache,
    "pools": Cache,
    "sequences": Swapped,
}


def write_value(path: Path, value: Cache | Swapped) -> None:
    """Write a value to a file atomically, keys and values a layer at a time.

    For a cache sharded over several processes, all of them call this and receive each
    layer, and one writes. Raises OSError on every process if writing fails.
    """
    tensors: dict[str, Tensor] = {}
    constants: dict[str, Any] = {}
    for name, leaf in list_leaves(_kept(value)):
        if (meant := _find_encoded_dtype(value, name)) is not None:
            if isinstance(value, Cache):
                tensors[name] = _by_layers(leaf, meant, value, int(name.split(".")[1]))
            else:
                tensors[name] = _by_pieces(leaf, meant)
        elif isinstance(leaf, int | np.dtype | tuple):
            constants[name] = _as_json(leaf)
        else:
            tensors[name] = Tensor(leaf.dtype, leaf.shape, (bring_whole(leaf),))
    kind = "sequences"
    if isinstance(value, Cache):
        kind = "cache" if value.pools is None else "pools"
    metadata = {"holds": kind, "fields": json.dumps(constants)}
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    # All groups are on the same devices.
    where: Any = None
    if isinstance(value, Cache):
        where = next(iter(value.storage[0].arrays.values())).sharding
    if is_shared(where):
        _write_together(path, tensors, metadata, where.mesh)
    else:
        files.write_file(path, tensors, metadata)


def read_value(path: Path, kinds: Kinds) -> Cache | Swapped:
    """Return the memory-mapped value in a file; `kinds` as for `build`."""
    metadata, arrays = files.read_file(path)
    # Metadata, such as observed queries, has its own dtypes.
    leaves: dict[str, Any] = {
        name: array
        if name.startswith("metadata.")
        else array.view(STORED_AS.get(array.dtype, array.dtype))
        for name, array in arrays.items()
    }
    try:
        leaves |= json.loads(metadata["fields"])
        kind = _KINDS[metadata["holds"]]
        for name in [each for each in leaves if ".contents.storage." in each]:
            leaves[name] = contents.cut_array(leaves[name])
        value = build(kind, leaves, kinds)
        if leaves:
            raise ValueError(f"it has unknown fields {sorted(leaves)}")
    except (LookupError, TypeError, ValueError) as error:
        raise FileError(path, f"is damaged: {error}") from error
    return value


def _kept(value: Cache | Swapped) -> Cache | Swapped:
    """Return the value to save: without copies of heads, sharding or debug mode."""
    if isinstance(value, Swapped):
        return value
    storage = tuple(each.with_sharding(None) for each in value.storage)
    metadata = dataclasses.replace(value.metadata, parts=())
    return dataclasses.replace(
        value, metadata=metadata, storage=storage, pools=None, interceptor=None
    )


def _as_json(leaf: Any) -> Any:
    """Return a constant with dtypes as strings and tuples as lists."""
    if isinstance(leaf, tuple):
        return [_as_json(each) for each in leaf]
    return leaf.name if isinstance(leaf, np.dtype) else leaf


def _find_encoded_dtype(value: Cache | Swapped, name: str) -> np.dtype[Any] | None:
    """Return the dtype encoded by a leaf of keys, values or scales; None for others."""
    within, *numbers = name.split(".", 2)
    if within not in ("storage", "groups") or len(numbers) < 2:
        return None
    groups = value.storage if isinstance(value, Cache) else value.groups
    encoded_dtype: np.dtype[Any] | None = groups[int(numbers[0])].encoded_dtype(
        numbers[1]
    )
    return encoded_dtype


def _by_layers(
    leaf: jax.Array, dtype: np.dtype[Any], cache: Cache, number: int
) -> Tensor:
    """Return keys, values or scales of a group as a tensor of host layers.

    `leaf` is [L, N, K, ...], with ranks and copies of heads if the cache has them.
    """
    sharding = cache.storage[number].sharding
    head_axis = POOL_HEADS if cache.pools is None else POOL_HEADS + 1
    shape = list(leaf.shape)
    shape[head_axis] //= copies_of(sharding)
    numbers = itertools.product(*map(range, shape[: head_axis - 1]))  # ranks, layers
    leaf = as_auto(leaf)  # ranks may be an Explicit axis
    layers = (bring_whole(leaf[layer]) for layer in numbers)
    heads = (without_copies_of_heads(sharding, layer, 1) for layer in layers)
    return Tensor(dtype, tuple(shape), heads)


def _by_pieces(pieces: Sequence[HostArray], dtype: np.dtype[Any]) -> Tensor:
    """Return keys, values or scales in pieces, [L, p, ...], as a tensor of layers."""
    arrays = tuple(map(np.asarray, pieces))
    if not arrays:
        return Tensor(dtype, (0, 0), ())
    num_layers, _, *rest = arrays[0].shape
    num_blocks = sum(array.shape[1] for array in arrays)
    layers = (array[i] for i in range(num_layers) for array in arrays)
    return Tensor(dtype, (num_layers, num_blocks, *rest), layers)


def _write_together(
    path: Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    mesh: jax.sharding.Mesh,
) -> None:
    """Write the file from one process, with the shards of all; raise in all of them."""
    failure: Exception | None = None
    if is_writer(mesh):
        try:
            files.write_file(path, tensors, metadata)
        except Exception as error:
            failure = error
    # Gathering is collective: the other processes, and a failed writer, take part too.
    for tensor in tensors.values():
        if isinstance(tensor.parts, Iterator):
            collections.deque(tensor.parts, maxlen=0)
    is_written = agree(mesh, failure is None)
    if failure is not None:
        raise failure
    if not is_written:
        raise OSError(f"could not write {os.fspath(path)}: another process failed")
