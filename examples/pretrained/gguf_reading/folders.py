"""A checkpoint's folder, made of a GGUF file once and kept in the user's cache."""

import hashlib
from pathlib import Path

from jkv.config import SUFFIX, find_file
from jkv.xla_flags import find_user_cache

# In front of the weights of such a folder, and written last.
INDEX = "gguf.index.json"
READING = 2  # raised when files are read otherwise, so that no older folder is taken
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def find_folder(model: str | Path) -> Path:
    """Return the folder of a checkpoint, which may be a GGUF file.

    Args:
        model: a checkpoint's folder, a GGUF file, the first of several parts of one, or
            a folder that holds one.

    Raises:
        ModuleNotFoundError: for a GGUF file without the package gguf.
        FileNotFoundError: for a file that is not there.
        ValueError: for a file that is damaged or not supported.
    """
    path = find_file(model) or Path(model)
    if path.suffix.lower() in PICKLED:
        raise ValueError(
            f"{path} is a pickle, which may run code: take the model's safetensors or "
            "a GGUF file"
        )
    if path.suffix.lower() != SUFFIX:
        return path
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    folder = _name_folder(path)
    if not (folder / INDEX).is_file():
        # Imported here: other checkpoints need no package gguf.
        from .unpacking import unpack

        unpack(path, folder)
    return folder


def _name_folder(path: Path) -> Path:
    """Return where a file's folder is kept: one for each content and way to read it."""
    file = path.resolve()
    known = file.stat()
    key = f"{file}\n{known.st_size}\n{known.st_mtime_ns}\n{READING}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return find_user_cache() / "jkv" / "gguf" / f"{path.stem}-{digest}"
