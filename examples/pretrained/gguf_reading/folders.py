"""A checkpoint's folder, made of a GGUF file once and kept in the user's cache."""

import hashlib
from pathlib import Path

from jkv.xla_flags import find_user_cache

# In front of the weights of such a folder, and written last.
INDEX = "gguf.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def find_folder(model: str | Path) -> Path:
    """Return the folder of a checkpoint, which may be a GGUF file.

    Args:
        model: a checkpoint's folder, a GGUF file, the first of those that one was split
            into, or a folder that holds one.

    Raises:
        ModuleNotFoundError: for a GGUF file without the package gguf.
        FileNotFoundError: for a file that is not there.
        ValueError: for a file that is damaged or holds what is not served.
    """
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        path = _choose(path)
    if path.suffix.lower() in PICKLED:
        raise ValueError(
            f"{path} is a pickle, which may run code: take the model's safetensors or "
            "a GGUF file"
        )
    if path.suffix.lower() != ".gguf":
        return path
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    folder = _name_folder(path)
    if not (folder / INDEX).is_file():
        # Imported here: other checkpoints need no package gguf.
        from .unpacking import unpack

        unpack(path, folder)
    return folder


def _choose(folder: Path) -> Path:
    """Return the one GGUF model in a folder, or the folder if there is none."""
    found = [
        path
        for path in sorted(folder.glob("*.gguf"))
        if "-of-" not in path.stem or "-00001-of-" in path.stem
    ]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ValueError(f"{folder} holds several GGUF models: name one of {names}")
    return found[0] if found else folder


def _name_folder(path: Path) -> Path:
    """Return where a file's folder is kept: another one when the file has changed."""
    file = path.resolve()
    known = file.stat()
    key = f"{file}\n{known.st_size}\n{known.st_mtime_ns}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return find_user_cache() / "jkv" / "gguf" / f"{path.stem}-{digest}"
