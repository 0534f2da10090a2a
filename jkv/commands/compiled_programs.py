"""Persistent compilation cache in the user's cache folder.

Compilation by XLA dominates a command's startup, and its programs are the same in the
next run. Libraries leave the setting to the user, but a command may enable it.
"""

import os
import pathlib

import jax

from jkv.arguments import explains_arguments
from jkv.xla_flags import find_user_cache

# The oldest programs are removed beyond this.
MOST_BYTES = 2**29


@explains_arguments
def keep_compiled_programs(
    folder: str | pathlib.Path | None = None,
) -> pathlib.Path | None:
    """Enable JAX's persistent compilation cache and return its folder.

    The setting holds for the process and for programs of any size, since verbs outside
    `jit` are many small ones. Call it before the first verb. Files beyond 512 MiB are
    removed, oldest first.

    Args:
      folder: a path; None selects `jkv/programs` in the user's cache folder.

    Returns:
      The folder. None, without a change, if JAX is configured otherwise
      (`JAX_COMPILATION_CACHE_DIR`) or the folder is not writable.

    Raises:
      UsageError: if `folder` is not a path.

    Example:
      >>> import jkv
      >>> folder = jkv.keep_compiled_programs()  # doctest: +SKIP
    """
    settings = jax.config.values
    folder = pathlib.Path(folder or find_user_cache() / "jkv" / "programs")
    if settings["jax_compilation_cache_dir"] not in (None, str(folder)):
        return None
    if not settings["jax_enable_compilation_cache"]:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_oldest(folder)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Many small programs take as long as a large one.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def remove_oldest(folder: pathlib.Path, most_bytes: int = MOST_BYTES) -> None:
    """If the limit is exceeded, remove the oldest files down to half of it."""
    files = [(path, path.stat()) for path in folder.iterdir() if path.is_file()]
    total = sum(stat.st_size for _, stat in files)
    if total <= most_bytes:
        return
    for path, stat in sorted(files, key=lambda file: file[1].st_mtime):
        if total <= most_bytes // 2:
            break
        path.unlink(missing_ok=True)
        total -= stat.st_size
