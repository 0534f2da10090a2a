"""Programs that were compiled once are kept in the user's cache folder.

Most of the time to a first answer is XLA's compiler, and its programs are the same in
the next run. JAX keeps them where it is told to; libraries leave that to the user, but
a command may choose.
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
    """Keep compiled programs in a folder, and find those of earlier runs there.

    This sets JAX's persistent compilation cache for the whole process, for programs of
    any size: the verbs outside `jit` are many small ones. Call it before the first of
    them. Files beyond 512 MiB are removed, the oldest first.

    Args:
      folder: where to; None is `jkv/programs` in the user's cache folder.

    Returns:
      The folder; None if JAX has one already (`JAX_COMPILATION_CACHE_DIR`), or if it
      cannot be written.

    Raises:
      UsageError: for what is no path.

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
    """Remove the oldest files until the rest is half of the limit, if it is passed."""
    files = [(path, path.stat()) for path in folder.iterdir() if path.is_file()]
    total = sum(stat.st_size for _, stat in files)
    if total <= most_bytes:
        return
    for path, stat in sorted(files, key=lambda file: file[1].st_mtime):
        if total <= most_bytes // 2:
            break
        path.unlink(missing_ok=True)
        total -= stat.st_size
