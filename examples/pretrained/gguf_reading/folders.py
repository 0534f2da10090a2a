"""Checkpoint folders made from GGUF files, in the user's cache."""

import hashlib
from pathlib import Path

from jkv.commands import find_user_cache
from jkv.config import SUFFIX, find_file

# Index of the tensors; written last, so it marks a complete folder.
INDEX = "gguf.index.json"
READING = 3  # version of the folders' contents
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def find_folder(model: str | Path) -> Path:
    """Return the folder of a checkpoint or GGUF file.

    Args:
        model: a checkpoint's folder, a GGUF file or the first of its parts, or a folder
            with a GGUF file.

    Raises:
        ModuleNotFoundError: for a GGUF file without the package gguf.
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is damaged or not supported.
    """
    path = find_file(model) or Path(model)
    if path.suffix.lower() in PICKLED:
        raise ValueError(
            f"{path} is a pickle, which may run code; use the model's safetensors or "
            "a GGUF file"
        )
    if path.suffix.lower() != SUFFIX:
        return path
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    folder = _name_folder(path)
    if not (folder / INDEX).is_file():
        # Imported here, since other checkpoints do not need the package gguf.
        from .unpacking import unpack

        unpack(path, folder)
    return folder


def _name_folder(path: Path) -> Path:
    """Return a folder named by a hash of the file's path, size, time and `READING`."""
    file = path.resolve()
    known = file.stat()
    key = f"{file}\n{known.st_size}\n{known.st_mtime_ns}\n{READING}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return find_user_cache() / "jkv" / "gguf" / f"{path.stem}-{digest}"
