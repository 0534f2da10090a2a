"""A cache, or sequences on the host, as one file of named arrays.

The arrays of the value are named by the fields that lead to them (`jkv.storage.fields`)
and its static fields stand beside them in the header. K/V stored as the bits of another
dtype carry that dtype's name in the file.
"""

import dataclasses
import json
from typing import Any

import numpy as np

from jkv.attention.elements import STORED_AS
from jkv.config.dtypes import SCALE_DTYPE, SCALE_NAMES, STORAGE_NAMES
from jkv.sharding.heads import copies_of, without_copies_of_heads
from jkv.sharding.storage_sharding import POOL_HEADS, StorageSharding
from jkv.state import Cache
from jkv.storage import contents, fields, files
from jkv.storage.files import FileError, Path, Tensor
from jkv.storage.swapped import Swapped

# What a file holds, by the name in its header.
_KINDS: dict[str, type[Cache] | type[Swapped]] = {"cache": Cache, "sequences": Swapped}


def write_value(path: Path, value: Cache | Swapped) -> None:
    """Write a value to a file, whole or not at all, K/V a layer at a time."""
    tensors: dict[str, Tensor] = {}
    constants: dict[str, int | str] = {}
    # A file knows nothing of a mesh: it holds the model's heads.
    kept = (
        dataclasses.replace(value, sharding=None) if isinstance(value, Cache) else value
    )
    for name, leaf in fields.list_leaves(kept):
        if isinstance(leaf, np.dtype):
            constants[name] = leaf.name
        elif isinstance(leaf, int):
            constants[name] = leaf
        elif (meant := _meant_dtype(name, value.dtype)) is None:
            tensors[name] = Tensor(leaf.dtype, leaf.shape, (np.asarray(leaf),))
        else:
            sharding = value.sharding if isinstance(value, Cache) else None
            tensors[name] = _by_layers(leaf, meant, sharding)
    (holds,) = (name for name, kind in _KINDS.items() if isinstance(value, kind))
    files.write_file(path, tensors, {"holds": holds, "fields": json.dumps(constants)})


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


def _by_layers(
    leaf: Any, dtype: np.dtype[Any], sharding: StorageSharding | None
) -> Tensor:
    """Describe K/V or scales as layers on the host, one at a time, heads once.

    Args:
      leaf: the array, [L, P, ...], or a tuple of its pieces, [L, p, ...].
      dtype: what its bits mean.
      sharding: of the storage.
    """
    # Pieces are on the host already, even where JAX holds them.
    pieces = tuple(map(np.asarray, leaf)) if isinstance(leaf, tuple) else (leaf,)
    if not pieces:
        return Tensor(dtype, (0, 0), ())
    shape = pieces[0].shape
    num_heads = shape[POOL_HEADS] // copies_of(sharding)
    num_blocks = sum(piece.shape[1] for piece in pieces)
    shape = (shape[0], num_blocks, num_heads, *shape[POOL_HEADS + 1 :])
    layers = (np.asarray(piece[i]) for i in range(shape[0]) for piece in pieces)
    heads = (
        without_copies_of_heads(sharding, layer, POOL_HEADS - 1) for layer in layers
    )
    return Tensor(dtype, shape, heads)
