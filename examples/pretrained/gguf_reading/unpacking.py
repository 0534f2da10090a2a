"""Creation of a checkpoint folder from a GGUF file."""

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ..checkpoint import list_names
from ..config import parse_config
from .folders import INDEX
from .settings import make_config
from .stored import read_file
from .tensors import name_tensors
from .vocabularies import find_ends, make_settings, make_tokenizer


def unpack(path: Path, folder: Path) -> None:
    """Write the folder of a GGUF file; the last file marks it as complete.

    Raises:
        ModuleNotFoundError: if the package gguf is not installed.
        FileNotFoundError: if a part of a split file is missing.
        ValueError: if the file is damaged or not supported.
    """
    file = read_file(path)
    config = make_config(file)
    known = list_names(parse_config(config))
    written: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": find_ends(file)},
        "tokenizer_config.json": make_settings(file),
        INDEX: {
            "file": str(file.paths[0].resolve()),
            "weight_map": name_tensors(file, known),
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "tokenizer.json", make_tokenizer(file).to_str())
    for name, contents in written.items():
        _write(folder / name, json.dumps(contents, ensure_ascii=False, indent=1))


def _write(path: Path, text: str) -> None:
    number, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
