"""XLA flags required on this machine, as saved by `jkv.doctor --first-light`.

XLA reads XLA_FLAGS once, at JAX's first computation. Commands set missing flags before
it (`set_known_flags`); the library only warns of them.
"""

import importlib.metadata
import json
import os
import pathlib
import sys
import warnings
from collections.abc import Sequence

# XLA records runs of small kernels as graphs, which some drivers replay incorrectly
# (docs/rocm.md). With an empty list of kinds it launches each kernel separately.
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="


def find_user_cache() -> pathlib.Path:
    """Return the user's cache folder on this system."""
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return pathlib.Path(os.environ["LOCALAPPDATA"])
    if sys.platform == "darwin":
        return pathlib.Path.home() / "Library" / "Caches"
    # The XDG specification says to ignore an empty or relative path.
    named = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else pathlib.Path.home() / ".cache"


def find_plugins() -> dict[str, str]:
    """Return the versions of jaxlib and of JAX's plugins, the key of saved flags."""
    names = {
        str(each.metadata["Name"]).replace("_", "-"): each.version
        for each in importlib.metadata.distributions()
    }
    wanted = ("jaxlib", "jax-rocm", "jax-cuda")
    return {name: names[name] for name in sorted(names) if name.startswith(wanted)}


def keep_flags(flags: Sequence[str]) -> None:
    """Save the flags required with the installed versions; delete them if empty."""
    path = _find_file()
    if not flags:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"versions": find_plugins(), "flags": list(flags)}
    path.write_text(json.dumps(kept, indent=1) + "\n")


def read_missing_flags() -> list[str]:
    """Return the saved flags that are missing from XLA_FLAGS."""
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
    """Add missing flags to XLA_FLAGS, for JAX's first computation in this process."""
    added = [_read_environment(), *read_missing_flags()]
    if len(added) > 1:
        os.environ["XLA_FLAGS"] = " ".join(added).strip()


def warn_of_missing_flags() -> None:
    """Warn of missing flags."""
    missing = " ".join(read_missing_flags())
    if missing:
        warnings.warn(
            f"XLA_FLAGS lacks {missing!r}, which this machine needs according to "
            f"python -m jkv.doctor --first-light; set it before Python starts",
            RuntimeWarning,
            stacklevel=2,
        )


def _find_file() -> pathlib.Path:
    return find_user_cache() / "jkv" / "first-light.json"


def _read_environment() -> str:
    return os.environ.get("XLA_FLAGS", "")
