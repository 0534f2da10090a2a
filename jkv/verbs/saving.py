"""save and load: a whole cache, or some of its sequences, as one file.

The arrays of a value are named by the fields that lead to them (`keys`,
`metadata.block_tables`, `metadata.free_blocks.ids`, ...) and its static fields stand
beside them in the header, so that a field added to the state is saved and loaded with
no change here. K/V stored as the bits of another dtype carry that dtype's name in the
file.

A whole cache is written and read layer by layer: the host never holds a second copy of
the pool. Sequences are gathered on the host first, as `swap_out` does.
"""

import dataclasses
import functools
import json
import os
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.dtypes import SCALE_DTYPE, SCALE_NAMES, STORAGE_DTYPES, STORAGE_NAMES
from jkv.inspection.invariants import check
from jkv.metadata.requests import Integers
from jkv.state import Cache
from jkv.status import InvariantError
from jkv.storage import contents, files
from jkv.storage.files import FileError, Tensor
from jkv.storage.swapped import Swapped, copy_out
from jkv.verbs.swapping import SwapIn, swap_in

Path: TypeAlias = str | os.PathLike[str]


Placement: TypeAlias = jax.Device | jax.sharding.Sharding | None


Value = TypeVar("Value")


def save(path: Path, cache: Cache, seq_ids: Integers | None = None) -> None:
    """Write a cache, or some of its sequences, to one file. For the host, outside jit.

    The file has the safetensors format and is written whole or not at all: under
    another name first, then renamed in place of whatever is at `path`. Progress is
    logged under the name "jkv".

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
    value = cache if seq_ids is None else copy_out(cache, seq_ids)
    tensors: dict[str, Tensor] = {}
    constants: dict[str, int | str] = {}
    for name, leaf in _leaves(value):
        if isinstance(leaf, np.dtype):
            constants[name] = leaf.name
        elif isinstance(leaf, int):
            constants[name] = leaf
        else:
            tensors[name] = _tensor(leaf, _meaning_of(name, cache.dtype))
    holds = "cache" if value is cache else "sequences"
    files.write_file(path, tensors, {"holds": holds, "fields": json.dumps(constants)})


@overload
def load(path: Path, cache: None = None, *, device: Placement = None) -> Cache: ...


@overload
def load(path: Path, cache: Cache, *, donate: bool = False) -> tuple[Cache, SwapIn]: ...


def load(
    path: Path,
    cache: Cache | None = None,
    *,
    device: Placement = None,
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
      donate: as for `swap_in`.

    Returns:
      The cache; or, given one, the new cache and a `SwapIn`.

    Raises:
      FileError: if the file is foreign, truncated, damaged or of a newer version.
      OSError: if it cannot be read.
      ValueError: if it holds sequences and no cache is given, or the cache given is of
        another shape or dtype.

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
    value = _read(path)
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
    metadata = jax.tree.map(lambda a: _whole(a, device), value.metadata)
    loaded = {name: _by_layers(pool, device) for name, pool in value.storage.items()}
    value = dataclasses.replace(value, metadata=metadata).with_storage(loaded)
    return jax.block_until_ready(value)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Walk the fields of a value down to its arrays, ints and dtypes, by name."""
    parts: dict[str, Any] = {}
    if dataclasses.is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif isinstance(value, dict):
        parts = value
    elif value is not None:
        yield name, value
    for field, part in parts.items():
        yield from _leaves(part, f"{name}.{field}" if name else field)


def _meaning_of(name: str, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype that the bits of K/V or scales mean; None for metadata."""
    field = name.rsplit(".", maxsplit=1)[-1]
    if field not in STORAGE_NAMES:
        return None
    return SCALE_DTYPE if field in SCALE_NAMES.values() else dtype


def _tensor(leaf: Any, meaning: np.dtype[Any] | None) -> Tensor:
    """Describe an array, or one [L, p, ...] in pieces, as layers [P, ...] on the host.

    Args:
      leaf: the array, or a tuple of its pieces.
      meaning: of its bits, as `_meaning` says.
    """
    if meaning is None:
        return Tensor(leaf.dtype, leaf.shape, (np.asarray(leaf),))
    # Pieces are on the host already, be it in memory that JAX holds.
    pieces = tuple(map(np.asarray, leaf)) if isinstance(leaf, tuple) else (leaf,)
    if not pieces:
        return Tensor(meaning, (0, 0), ())
    shape = pieces[0].shape
    shape = (shape[0], sum(piece.shape[1] for piece in pieces), *shape[2:])
    layers = (piece[i] for i in range(shape[0]) for piece in pieces)
    return Tensor(meaning, shape, (np.asarray(layer) for layer in layers))


def _read(path: Path) -> Cache | Swapped:
    """Return what a file holds, its arrays mapped from the file."""
    metadata, arrays = files.read_file(path)
    kept = {
        name: array.view(STORAGE_DTYPES.get(array.dtype, array.dtype))
        for name, array in arrays.items()
    }
    try:
        leaves = kept | json.loads(metadata["fields"])
        kinds: dict[str, type[Cache] | type[Swapped]]
        kinds = {"cache": Cache, "sequences": Swapped}
        value = _built(kinds[metadata["holds"]], leaves)
        if leaves:
            raise ValueError(f"it holds {sorted(leaves)}, which this jkv does not know")
        if isinstance(value, Cache):
            check(value)
    except (KeyError, TypeError, ValueError, InvariantError) as error:
        raise FileError(path, f"is damaged: {error}") from error
    return value


def _built(kind: type[Value], leaves: dict[str, Any], name: str = "") -> Value:
    """Make a value of leaves named as `_leaves` names them, and take these out."""
    parts: dict[str, Any] = {}
    for field, hint in typing.get_type_hints(kind).items():
        path = f"{name}.{field}" if name else field
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint]
        inner = next((o for o in options if dataclasses.is_dataclass(o)), None)
        within = [key for key in leaves if key.startswith(f"{path}.")]
        if isinstance(inner, type) and within:
            parts[field] = _built(inner, leaves, path)
        elif typing.get_origin(hint) is dict:
            parts[field] = {
                key.removeprefix(f"{path}."): _in_pieces(leaves.pop(key))
                for key in within
            }
        elif path in leaves:
            leaf = leaves.pop(path)
            parts[field] = jnp.dtype(leaf) if isinstance(leaf, str) else leaf
        elif type(None) in options:
            parts[field] = None
        else:
            raise ValueError(f"it lacks {path!r}, which this jkv needs")
    return kind(**parts)


def _in_pieces(array: np.ndarray) -> tuple[np.ndarray, ...]:
    """Cut an array of blocks, [L, P, ...], as `swap_out` does."""
    return tuple(array[:, piece] for piece in contents.in_pieces(array.shape[1]))


def _whole(array: np.ndarray, device: Placement) -> jax.Array:
    """Copy an array from the file to the device."""
    return jnp.array(np.array(array), device=device)


def _by_layers(array: np.ndarray | jax.Array, device: Placement) -> jax.Array:
    """Copy an array [L, ...] from the file to the device layer by layer."""
    pool = jnp.zeros(array.shape, array.dtype, device=device)
    for number, layer in enumerate(array):
        # Waiting keeps copies of layers from piling up on their way.
        pool = jax.block_until_ready(_set_layer(pool, np.int32(number), layer))
    return pool


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(pool: jax.Array, number: jax.Array, layer: jax.Array) -> jax.Array:
    return pool.at[number].set(layer)
