"""Sampling defaults of a checkpoint, from generation_config.json.

As in ``transformers``, a file with any of these settings determines all of them:
missing ones have the library's defaults, and sampling is greedy without ``do_sample``.
"""

from pathlib import Path
from typing import Any

from .gguf_reading import find_folder
from .settings import read_json

# Defaults of transformers, by field of `jkv.Sampling`.
DEFAULTS: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def read_sampling(folder: str | Path) -> dict[str, Any]:
    """Return fields for ``jkv.Sampling``; empty if the checkpoint has no settings.

    Raises:
        ValueError: if a setting has the wrong type.
    """
    path = find_folder(folder) / "generation_config.json"
    settings = read_json(path) if path.is_file() else {}
    given = {
        name: settings[name] for name in DEFAULTS if settings.get(name) is not None
    }
    for name, value in given.items():
        wanted = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ValueError(f"{path}: {name!r} must be a number, got {value!r}")
    does_sample = settings.get("do_sample")
    if does_sample not in (None, True, False):
        raise ValueError(f"{path}: 'do_sample' must be true or false: {does_sample!r}")
    if not given and does_sample is None:
        return {}
    greedy = {} if does_sample else {"temperature": 0.0}
    return DEFAULTS | given | greedy
