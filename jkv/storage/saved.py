"""A cache, or sequences on the host, as one file of named arrays.

The arrays of the value are named by the fields that lead to them (`jkv.storage.fields`)
and its static fields stand beside them in the header, in JSON. K/V stored as the bits
of another dtype carry that dtype's name in the file.
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
from jkv.sharding.processes import agree, bring_whole, is_shared, is_writer
from jkv.sharding.storage_sharding import (
    POOL_HEADS,
    as_auto,
    copies_of,
    without_copies_of_heads,
)
from jkv.state import Cache
from jkv.storage import fields, files
from jkv.storage.files import FileError, Path, Tensor
from jkv.storage.swapped import Swapped

# What a file holds, by the name in its header. Pools are a cache whose arrays have an
# axis of ranks first.
_KINDS: dict[str, type[Cache] | type[Swapped]] = {
    "cache": Cache,
    "pools": Cache,
    "sequences": Swapped,
}


def write_value(path: Path, value: Cache | Swapped) -> None:
    """Write a value to a file, whole or not at all, K/V a layer at a time.

    Of a cache that lies on devices of several processes, all of them call this and get
    each layer, and one writes. OSError on every process if it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    constants: dict[str, Any] = {}
    for name, leaf in fields.list_leaves(_kept(value)):
        if (meant := _find_meaning(value, name)) is not None:
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
    # All groups lie on the same devices.
    where: Any = None
    if isinstance(value, Cache):
        where = next(iter(value.storage[0].arrays.values())).sharding
    if is_shared(where):
        _write_together(path, tensors, metadata, where.mesh)
    else:
        files.write_file(path, tensors, metadata)


def read_value(path: Path, kinds: fields.Kinds) -> Cache | Swapped:
    """Return what a file of `write_value` holds, mapped; kinds as for `build`."""
    metadata, arrays = files.read_file(path)
    leaves: dict[str, Any] = {
        name: array.view(STORED_AS.get(array.dtype, array.dtype))
        for name, array in arrays.items()
    }
    try:
        leaves |= json.loads(metadata["fields"])
        kind = _KINDS[metadata["holds"]]
        for name in [each for each in leaves if ".contents.storage." in each]:
            leaves[name] = contents.cut_array(leaves[name])
        value = fields.build(kind, leaves, kinds)
        if leaves:
            raise ValueError(f"it holds {sorted(leaves)}, which this jkv does not know")
    except (LookupError, TypeError, ValueError) as error:
        raise FileError(path, f"is damaged: {error}") from error
    return value


def _kept(value: Cache | Swapped) -> Cache | Swapped:
    """Return what a file keeps: the model's heads, on no mesh, and no debug mode."""
    if isinstance(value, Swapped):
        return value
    storage = tuple(each.with_sharding(None) for each in value.storage)
    metadata = dataclasses.replace(value.metadata, parts=())
    return dataclasses.replace(
        value, metadata=metadata, storage=storage, pools=None, watcher=None
    )


def _as_json(leaf: Any) -> Any:
    """Return a constant whose dtypes are their names."""
    if isinstance(leaf, tuple):
        return [_as_json(each) for each in leaf]
    return leaf.name if isinstance(leaf, np.dtype) else leaf


def _find_meaning(value: Cache | Swapped, name: str) -> np.dtype[Any] | None:
    """Return what the bits of a leaf mean that is K/V or scales; None of any other."""
    within, *numbers = name.split(".", 2)
    if within not in ("storage", "groups") or len(numbers) < 2:
        return None
    groups = value.storage if isinstance(value, Cache) else value.groups
    meaning: np.dtype[Any] | None = groups[int(numbers[0])].meaning(numbers[1])
    return meaning


def _by_layers(
    leaf: jax.Array, dtype: np.dtype[Any], cache: Cache, number: int
) -> Tensor:
    """Describe K/V or scales of a group as layers on the host, one at a time.

    The array is [L, N, K, ...], with ranks and copies of heads if the cache has them.
    """
    sharding = cache.storage[number].sharding
    head_axis = POOL_HEADS if cache.pools is None else POOL_HEADS + 1
    shape = list(leaf.shape)
    shape[head_axis] //= copies_of(sharding)
    numbers = itertools.product(*map(range, shape[: head_axis - 1]))  # ranks, layers
    leaf = as_auto(leaf)  # whose ranks may be an Explicit axis
    layers = (bring_whole(leaf[layer]) for layer in numbers)
    heads = (without_copies_of_heads(sharding, layer, 1) for layer in layers)
    return Tensor(dtype, tuple(shape), heads)


def _by_pieces(pieces: Sequence[HostArray], dtype: np.dtype[Any]) -> Tensor:
    """Describe K/V or scales, cut into pieces [L, p, ...] on the host, by layers."""
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
    """Let one of several processes write what all of them bring."""
    failure: Exception | None = None
    if is_writer(mesh):
        try:
            files.write_file(path, tensors, metadata)
        except Exception as error:
            failure = error
    # The other processes bring all parts; one that failed, those it had not brought.
    for tensor in tensors.values():
        if isinstance(tensor.parts, Iterator):
            collections.deque(tensor.parts, maxlen=0)
    is_written = agree(mesh, failure is None)
    if failure is not None:
        raise failure
    if not is_written:
        raise OSError(f"{os.fspath(path)} was not written: another process failed")
