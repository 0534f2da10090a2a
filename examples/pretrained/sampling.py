"""How a checkpoint wants its tokens chosen: generation_config.json.

With ``transformers`` a file that has one of these settings decides about all of them:
missing ones have the library's default, and without ``do_sample`` it is greedy.
"""

from pathlib import Path
from typing import Any

from .gguf_reading import find_folder
from .settings import read_json

# The library's defaults, by the names that `jkv.Sampling` has, too.
DEFAULTS: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def read_sampling(folder: str | Path) -> dict[str, Any]:
    """Return fields for ``jkv.Sampling``; empty where the checkpoint says nothing.

    Raises:
        ValueError: when a setting is not of its type.
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
