"""On-disk cache of compiled grammars, addressed by a hash of their inputs.

Each file starts with the hash of its contents, so that a truncated or modified file is
detected before it is parsed.
"""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import tempfile
import weakref
from collections.abc import Callable
from typing import Any, TypedDict

import jax
import numpy as np

from jkv.grammar.bounds import Bounds, Timeout
from jkv.grammar.errors import TooLarge
from jkv.grammar.grammar import Grammar
from jkv.grammar.vocabulary import Vocabulary

# Of the compiler's output; increment it when the same input compiles differently.
_VERSION = 4
_DIGEST_BYTES = 32
MAX_FOLDER_BYTES = 2**30

Folder = str | os.PathLike[str] | None


class Limits(TypedDict, total=False):
    """Compilation limits and cache folder, as in `concatenate`."""

    max_bytes: int
    timeout: Timeout
    folder: Folder


def keep(
    folder: Folder,
    vocabulary: Vocabulary,
    cache_key: Any,
    make: Callable[[], Grammar],
    max_bytes: int,
) -> Grammar:
    """Return a cached grammar, or make and cache it; with folder None, make it.

    `cache_key` holds the remaining inputs of the grammar as JSON. A damaged file is
    replaced. Processes may share a folder, since files are renamed into place. Past
    `MAX_FOLDER_BYTES` the least recently used files are deleted. A cached grammar whose
    arrays exceed `max_bytes` raises `TooLarge`, like a compiled one.
    """
    if folder is None:
        return make()
    try:
        text = json.dumps([_VERSION, cache_key]).encode()
    except (TypeError, RecursionError):
        return make()  # raises a clear error for input that is not JSON
    name = hashlib.sha256(_hash_of(vocabulary) + text).hexdigest()
    path = pathlib.Path(folder) / f"{name}.grammar"
    try:
        grammar = _read(path)
        found = sum(leaf.nbytes for leaf in jax.tree.leaves(grammar))
        what = f"the cached grammar {path}"
        Bounds(max_bytes).hold(found, what)
        return grammar
    except TooLarge:
        raise
    except (FileNotFoundError, ValueError):
        grammar = make()
        _write(path, grammar)
        _remove_oldest(path.parent)
        return grammar


_HASHES: "weakref.WeakKeyDictionary[Vocabulary, bytes]" = weakref.WeakKeyDictionary()


def _hash_of(vocabulary: Vocabulary) -> bytes:
    if vocabulary not in _HASHES:
        tokens = [b"" if token is None else token for token in vocabulary.tokens]
        lengths = [len(token) for token in tokens]
        hashed = hashlib.sha256(json.dumps([lengths, vocabulary.end_tokens]).encode())
        hashed.update(b"".join(tokens))
        _HASHES[vocabulary] = hashed.digest()
    return _HASHES[vocabulary]


def _read(path: pathlib.Path) -> Grammar:
    written = path.read_bytes()
    digest, data = written[:_DIGEST_BYTES], written[_DIGEST_BYTES:]
    if digest != hashlib.sha256(data).digest():
        raise ValueError(f"{path} is damaged")
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    with contextlib.suppress(OSError):  # another process may have deleted it
        os.utime(path)
    size = int(arrays.pop("vocabulary_size"))
    placed = {name: jax.device_put(values) for name, values in arrays.items()}
    return Grammar(vocabulary_size=size, **placed)


def _write(path: pathlib.Path, grammar: Grammar) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = vars(grammar)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    data = buffer.getvalue()
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(hashlib.sha256(data).digest() + data)
    os.replace(file.name, path)


def _remove_oldest(folder: pathlib.Path) -> None:
    """Delete the least recently used files past `MAX_FOLDER_BYTES`."""
    found = []
    for path in folder.glob("*.grammar"):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    num_bytes = 0
    for _, size, path in sorted(found, reverse=True):
        num_bytes += size
        if num_bytes > MAX_FOLDER_BYTES:
            with contextlib.suppress(OSError):
                path.unlink()
