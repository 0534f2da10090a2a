"""XLA's flags that this machine needs, as `jkv.doctor --first-light` found and kept.

XLA reads XLA_FLAGS once, when JAX's first computation starts. So a command sets them
before (`set_known_flags`), and a library, which may not, says what is to be set.
"""

import importlib.metadata
import json
import os
import pathlib
import sys
import warnings
from collections.abc import Sequence

# XLA packs runs of small kernels into graphs, and some drivers replay them wrongly
# (docs/rocm.md): without a kind in the list it launches each kernel by itself.
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="


def find_user_cache() -> pathlib.Path:
    """Return the folder in which this system's programs cache for a user."""
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return pathlib.Path(os.environ["LOCALAPPDATA"])
    if sys.platform == "darwin":
        return pathlib.Path.home() / "Library" / "Caches"
    # An empty or relative XDG_CACHE_HOME is to be ignored, says its specification.
    named = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else pathlib.Path.home() / ".cache"


def find_plugins() -> dict[str, str]:
    """Return the versions of jaxlib and of JAX's plugins: a kept result is of these."""
    names = {
        str(each.metadata["Name"]).replace("_", "-"): each.version
        for each in importlib.metadata.distributions()
    }
    wanted = ("jaxlib", "jax-rocm", "jax-cuda")
    return {name: names[name] for name in sorted(names) if name.startswith(wanted)}


def keep_flags(flags: Sequence[str]) -> None:
    """Keep what these versions need; an empty sequence forgets what was kept."""
    path = _find_file()
    if not flags:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"versions": find_plugins(), "flags": list(flags)}
    path.write_text(json.dumps(kept, indent=1) + "\n")


def read_missing_flags() -> list[str]:
    """Return what was found to be needed with these versions and is not set."""
    try:
        kept = json.loads(_find_file().read_text())
        flags = [str(flag) for flag in kept["flags"]]
        if not flags or kept["versions"] != find_plugins():
            return []
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return []
    named = {each.partition("=")[0] for each in _read_environment().split()}
    return [flag for flag in flags if flag.partition("=")[0] not in named]


def set_known_flags() -> None:
    """Set what is missing, for JAX's first computation in this process."""
    added = [_read_environment(), *read_missing_flags()]
    if len(added) > 1:
        os.environ["XLA_FLAGS"] = " ".join(added).strip()


def warn_of_missing_flags() -> None:
    """Name what is missing in a warning."""
    missing = " ".join(read_missing_flags())
    if missing:
        warnings.warn(
            f"python -m jkv.doctor --first-light found that this machine needs "
            f"XLA_FLAGS={missing!r}: set it before Python starts",
            RuntimeWarning,
            stacklevel=2,
        )


def _find_file() -> pathlib.Path:
    return find_user_cache() / "jkv" / "first-light.json"


def _read_environment() -> str:
    return os.environ.get("XLA_FLAGS", "")
