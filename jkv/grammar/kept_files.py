"""Compiled grammars in a folder, found again by a hash of what they were made of.

A file begins with the hash of what is behind: one that was cut or changed is told
before anything reads it.
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

# Of what a compiler makes of the same arguments; raise it where that changes.
_VERSION = 4
_DIGEST_BYTES = 32
MAX_FOLDER_BYTES = 2**30

Folder = str | os.PathLike[str] | None


class Limits(TypedDict, total=False):
    """What compiling may take, and where grammars are kept, as `concatenate` has it."""

    max_bytes: int
    timeout: Timeout
    folder: Folder


def keep(
    folder: Folder,
    vocabulary: Vocabulary,
    asked: Any,
    make: Callable[[], Grammar],
    max_bytes: int,
) -> Grammar:
    """Return a grammar from a folder, or make it and put it there; None keeps nothing.

    What else it depends on is `asked`, of JSON. A file that is damaged is made anew.
    Several processes may share a folder: files appear whole. Of more than
    `MAX_FOLDER_BYTES` those go that were looked up longest ago. A grammar whose arrays
    exceed `max_bytes` is refused, whoever has compiled it.
    """
    if folder is None:
        return make()
    try:
        text = json.dumps([_VERSION, asked]).encode()
    except (TypeError, RecursionError):
        return make()  # which says what is wrong with it
    name = hashlib.sha256(_hash_of(vocabulary) + text).hexdigest()
    path = pathlib.Path(folder) / f"{name}.grammar"
    try:
        grammar = _read(path)
        found = sum(leaf.nbytes for leaf in jax.tree.leaves(grammar))
        what = f"the grammar that is kept in {path}"
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
    with contextlib.suppress(OSError):  # another process may have removed it
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
    """Remove the files that were looked up longest ago, where there are too many."""
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
