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
from jkv.formats.bits import STORED_AS
from jkv.formats.format import STORAGE_NAMES
from jkv.sharding.heads import copies_of, without_copies_of_heads
from jkv.sharding.processes import agree, bring_whole, is_shared, is_writer
from jkv.sharding.resharding import as_auto
from jkv.sharding.storage_sharding import POOL_HEADS
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

# How version 2 of the format named what has another place now: paths, or beginnings of
# some.
_RENAMED = {
    "metadata.states.num_pending": "metadata.sequences.num_pending",
    "metadata.states.texts": "metadata.index.snapshots.sequence_texts",
    "metadata.states.snapshots.": "metadata.index.snapshots.",
}
# And what it numbered by kind: groups with blocks, and groups with a state.
_NUMBERED = {
    "metadata.groups": ("metadata.groups", False),
    "storage": ("storage", False),
    "states": ("storage", True),
}


def write_value(path: Path, value: Cache | Swapped) -> None:
    """Write a value to a file, whole or not at all, K/V a layer at a time.

    Of a cache that lies on devices of several processes, all of them call this and get
    each layer, and one writes.

    Raises:
      OSError: if it cannot be written, on every process.
    """
    tensors: dict[str, Tensor] = {}
    constants: dict[str, Any] = {}
    for name, leaf in fields.list_leaves(_kept(value)):
        if _is_stored(name):
            tensors[name] = _describe_stored(value, name, leaf)
        elif isinstance(leaf, int | np.dtype | tuple):
            constants[name] = _as_json(leaf)
        else:
            tensors[name] = Tensor(leaf.dtype, leaf.shape, (bring_whole(leaf),))
    metadata = {"holds": _kind_of(value), "fields": json.dumps(constants)}
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
    """Return what a file holds, its arrays mapped from the file.

    Args:
      path: the file.
      kinds: what may stand where a field of a cache has a face.

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
        kind = _KINDS[metadata["holds"]]
        leaves = _renamed(leaves)
        _add_head_dims(leaves)
        _add_value_dtypes(leaves)
        if kind is Swapped:
            stored = filter(_is_stored, leaves)
            leaves |= {name: contents.cut_array(leaves[name]) for name in stored}
        value = fields.build(kind, leaves, kinds)
        if leaves:
            raise ValueError(f"it holds {sorted(leaves)}, which this jkv does not know")
    except (LookupError, TypeError, ValueError) as error:
        raise FileError(path, f"is damaged: {error}") from error
    return value


def _renamed(leaves: dict[str, Any]) -> dict[str, Any]:
    """Return leaves of a file of any version by the names that they have now."""
    leaves = {_present_name(name): leaf for name, leaf in leaves.items()}
    if "state_numbers" not in leaves:
        return leaves
    with_state: list[int] = leaves.pop("state_numbers")
    most_pending = leaves.pop("metadata.states.max_pending", None)
    for empty in "metadata.groups", "storage", "states":
        leaves.pop(empty, None)
    stored = {name.split(".")[1] for name in leaves if name.startswith("storage.")}
    num_groups = len(stored)
    kinds = {True: with_state, False: [*range(num_groups + len(with_state))]}
    kinds[False] = [number for number in kinds[False] if number not in with_state]

    def numbered(name: str) -> str:
        for before, (now, is_state) in _NUMBERED.items():
            if name.startswith(f"{before}."):
                number, rest = name.removeprefix(f"{before}.").split(".", 1)
                return f"{now}.{kinds[is_state][int(number)]}.{rest}"
        return name

    leaves = {numbered(name): leaf for name, leaf in leaves.items()}
    pending = {f"metadata.groups.{i}.max_pending": most_pending for i in with_state}
    return leaves | pending | {"metadata.parts": ()}


def _present_name(name: str) -> str:
    """Return the name that a leaf has now, but for its group."""
    for before, now in _RENAMED.items():
        if name.startswith(before):
            return now + name.removeprefix(before)
    return name


def _add_head_dims(leaves: dict[str, Any]) -> None:
    """Add what earlier files left to the shapes of keys and values."""
    for name in [each for each in leaves if each.endswith(".key_pool")]:
        if not _is_stored(name):  # a state may have any name
            continue
        group = name.removesuffix("key_pool")
        if not group.startswith("storage.") or f"{group}head_dim" in leaves:
            continue
        in_keys = leaves.pop(f"{group}latent_value_dim", None)
        leaves |= {
            f"{group}head_dim": leaves[name].shape[-1],
            f"{group}value_head_dim": in_keys or leaves[f"{group}value_pool"].shape[-1],
            f"{group}values_in_keys": in_keys is not None,
        }


def _add_value_dtypes(leaves: dict[str, Any]) -> None:
    """Add what earlier files left out, as values were stored as the keys are."""
    for name in [n for n in leaves if n.endswith(".dtype") and n.count(".") == 2]:
        leaves.setdefault(name.replace(".dtype", ".value_dtype"), leaves[name])


def _kept(value: Cache | Swapped) -> Cache | Swapped:
    """Return what a file keeps: it holds the model's heads and knows nothing of a mesh.

    Nor of debug mode.
    """
    if isinstance(value, Swapped):
        return value
    storage = tuple(
        dataclasses.replace(each, sharding=None) if each.has_blocks else each
        for each in value.storage
    )
    metadata = dataclasses.replace(value.metadata, parts=())
    return dataclasses.replace(
        value, metadata=metadata, storage=storage, pools=None, watcher=None
    )


def _as_json(leaf: Any) -> Any:
    """Return a constant whose dtypes are their names."""
    if isinstance(leaf, tuple):
        return [_as_json(each) for each in leaf]
    return leaf.name if isinstance(leaf, np.dtype) else leaf


def _is_stored(name: str) -> bool:
    """Return whether a leaf of that name is K/V or scales."""
    *within, last = name.split(".")
    return last in STORAGE_NAMES and len(within) in (2, 4)


def _describe_stored(value: Cache | Swapped, name: str, leaf: Any) -> Tensor:
    """Describe K/V or scales, whose bits mean something, of a group."""
    number = int(name.split(".")[1])
    part = value.storage[number] if isinstance(value, Cache) else value.groups[number]
    kept, element = part.formats.of(name.rsplit(".", maxsplit=1)[-1])
    meant = kept.arrays(2)[element].meaning
    if isinstance(value, Cache):
        return _by_layers(leaf, meant, value, number)
    return _by_pieces(leaf, meant)


def _kind_of(value: Cache | Swapped) -> str:
    if isinstance(value, Swapped):
        return "sequences"
    return "cache" if value.pools is None else "pools"


def _by_layers(
    leaf: jax.Array, dtype: np.dtype[Any], cache: Cache, number: int
) -> Tensor:
    """Describe K/V or scales of a cache as layers on the host, one at a time.

    Args:
      leaf: the array, [L, N, K, ...], with ranks and copies of heads if the cache has.
      dtype: what its bits mean.
      cache: that has it.
      number: of its group.
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
