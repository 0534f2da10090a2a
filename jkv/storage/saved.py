"""A cache, or sequences on the host, as one file of named arrays.

The arrays of the value are named by the fields that lead to them (`jkv.storage.fields`)
and its static fields stand beside them in the header. K/V stored as the bits of another
dtype carry that dtype's name in the file.
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

from jkv.attention.elements import STORED_AS
from jkv.config.dtypes import SCALE_DTYPE, SCALE_NAMES, STORAGE_NAMES
from jkv.sharding.heads import copies_of, without_copies_of_heads
from jkv.sharding.processes import agree, bring_whole, is_first, is_shared
from jkv.sharding.storage_sharding import POOL_HEADS
from jkv.state import Cache
from jkv.storage import contents, fields, files
from jkv.storage.contents import HostArray
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
    each layer, and one writes.

    Raises:
      OSError: if it cannot be written, on every process.
    """
    tensors: dict[str, Tensor] = {}
    constants: dict[str, int | str] = {}
    # A file knows nothing of a mesh: it holds the model's heads.
    kept: Cache | Swapped = value
    if isinstance(value, Cache):
        kept = dataclasses.replace(value, sharding=None, pools=None)
    for name, leaf in fields.list_leaves(kept):
        if isinstance(leaf, np.dtype):
            constants[name] = leaf.name
        elif isinstance(leaf, int):
            constants[name] = leaf
        elif (meant := _meant_dtype(name, value.dtype)) is None:
            tensors[name] = Tensor(leaf.dtype, leaf.shape, (bring_whole(leaf),))
        elif isinstance(value, Cache):
            tensors[name] = _by_layers(leaf, meant, value)
        else:
            tensors[name] = _by_pieces(leaf, meant)
    metadata = {"holds": _kind_of(value), "fields": json.dumps(constants)}
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    where: Any = value.keys.sharding if isinstance(value, Cache) else None
    if is_shared(where):
        _write_together(path, tensors, metadata, where.mesh)
    else:
        files.write_file(path, tensors, metadata)


def read_value(path: Path) -> Cache | Swapped:
    """Return what a file holds, its arrays mapped from the file.

    Raises:
      FileError: if the file is not one that `write_value` wrote.
    """
    metadata, arrays = files.read_file(path)
    leaves: dict[str, Any] = {
        name: array.view(STORED_AS.get(array.dtype, array.dtype))
        for name, array in arrays.items()
    }
    try:
        leaves |= json.loads(metadata["fields"])
        value = fields.build(_KINDS[metadata["holds"]], leaves)
        if leaves:
            raise ValueError(f"it holds {sorted(leaves)}, which this jkv does not know")
        if isinstance(value, Swapped):
            whole: Any = value.contents.storage
            held = dataclasses.replace(
                value.contents, storage=contents.cut_arrays(whole)
            )
            return dataclasses.replace(value, contents=held)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(path, f"is damaged: {error}") from error
    return value


def _meant_dtype(name: str, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return what the bits of K/V or scales mean, by name; None for metadata."""
    field = name.rsplit(".", maxsplit=1)[-1]
    if field not in STORAGE_NAMES:
        return None
    return SCALE_DTYPE if field in SCALE_NAMES.values() else dtype


def _kind_of(value: Cache | Swapped) -> str:
    if isinstance(value, Swapped):
        return "sequences"
    return "cache" if value.pools is None else "pools"


def _by_layers(leaf: jax.Array, dtype: np.dtype[Any], cache: Cache) -> Tensor:
    """Describe K/V or scales of a cache as layers on the host, one at a time.

    Args:
      leaf: the array, [L, N, K, ...], with ranks and copies of heads if the cache has.
      dtype: what its bits mean.
      cache: that has it.
    """
    place = POOL_HEADS if cache.pools is None else POOL_HEADS + 1
    shape = list(leaf.shape)
    shape[place] //= copies_of(cache.sharding)
    numbers = itertools.product(*map(range, shape[: place - 1]))  # ranks, layers
    layers = (bring_whole(leaf[number]) for number in numbers)
    heads = (without_copies_of_heads(cache.sharding, layer, 1) for layer in layers)
    return Tensor(dtype, tuple(shape), heads)


def _by_pieces(pieces: Sequence[HostArray], dtype: np.dtype[Any]) -> Tensor:
    """Describe K/V or scales, cut into pieces [L, p, ...] on the host, layer by layer.

    Args:
      pieces: arrays of numpy, or in memory of the host that JAX holds.
      dtype: what their bits mean.
    """
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
    if is_first(mesh):
        try:
            files.write_file(path, tensors, metadata)
        except Exception as error:
            failure = error
    # The others bring all parts, and so does one that failed what it had not taken.
    for tensor in tensors.values():
        if isinstance(tensor.parts, Iterator):
            collections.deque(tensor.parts, maxlen=0)
    is_written = agree(mesh, failure is None)
    if failure is not None:
        raise failure
    if not is_written:
        raise OSError(f"{os.fspath(path)} was not written: another process failed")
