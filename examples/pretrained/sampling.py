"""Sampling defaults of a checkpoint, from generation_config.json.

As in ``transformers``, a file with any of these settings determines all of them:
missing ones have the library's defaults, and sampling is greedy without ``do_sample``.
"""

from pathlib import Path
from typing import Any

from .gguf_reading import find_folder
from .settings import is_int, is_number, read_json

# Defaults of transformers, by field of `jkv.Sampling`.
DEFAULTS: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}

# Minimum and maximum of each; a top-k of -1 is none, as in vLLM.
RANGES = {
    "temperature": (0, 100),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 100),
}


def read_sampling(folder: str | Path) -> dict[str, Any]:
    """Return fields for ``jkv.Sampling``; empty if the checkpoint has no settings.

    Raises:
        ValueError: if a setting has the wrong type or is out of its range.
    """
    path = find_folder(folder) / "generation_config.json"
    settings = read_json(path) if path.is_file() else {}
    given = {
        name: settings[name] for name in DEFAULTS if settings.get(name) is not None
    }
    for name, value in given.items():
        least, most = RANGES[name]
        is_kind = is_int(value) if name == "top_k" else is_number(value)
        if not is_kind or not least <= value <= most:
            raise ValueError(
                f"{path}: {name!r} must be a number from {least} to {most}, got "
                f"{value!r}"
            )
    does_sample = settings.get("do_sample")
    if does_sample not in (None, True, False):
        raise ValueError(f"{path}: 'do_sample' must be true or false: {does_sample!r}")
    if not given and does_sample is None:
        return {}
    greedy = {} if does_sample else {"temperature": 0.0}
    fields = DEFAULTS | given | greedy
    return fields | {"top_k": max(0, fields["top_k"])}
