"""Executables saved in a folder, so that a restart skips tracing and compilation.

JAX's compilation cache is keyed by the lowered program, so that a restart still traces
and lowers in Python, its longest part. This key consists of the inputs of compilation:
code, shapes, device and settings. jkv and JAX provide theirs; the author of the model
provides a version of its code.

Executables are serialized by `jax.experimental.serialize_executable`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import pickle
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import jkv
from jkv.commands import remove_oldest
from jkv.storage.files import replacing
from jkv.verbs.writing import WRITE_SWITCH

logger = logging.getLogger("jkv.serving")

# The static argument represented by `KeptPrograms.version` in the key.
_MODEL = "model"


@dataclasses.dataclass(frozen=True)
class KeptPrograms:
    """Folder of an engine's executables, and the version of its model.

    The files are executed without verification: only the user may have write access.

    Attributes:
      version: identifies the model; change it with the code or with any setting other
        than an array or its shape, such as a configuration. It covers the draft model,
        too.
      folder: of a few megabytes for each engine; the oldest files beyond half a
        gigabyte are removed.
      sources: modules and packages of the models; the content of their files is part of
        the version.

    Example:
      >>> import jkv
      >>> from jkv.serving import KeptPrograms
      >>> kept = KeptPrograms("my decoder, 2 layers", folder="kept", sources=(jkv,))
      >>> engine = Engine(model, params, cache, max_running=8, max_new_tokens=128,
      ...     kept_programs=kept)  # doctest: +SKIP
    """

    version: str
    folder: str | Path
    sources: tuple[ModuleType, ...] = ()

    def find(
        self, program: Any, static: dict[str, Any], dynamic: dict[str, Any]
    ) -> Callable[..., Any]:
        """Return the executable for these arguments, loaded or compiled and saved.

        It takes the dynamic arguments; `out_info` has the shapes of its results.
        """
        path = self._name_file(program, static, dynamic)
        executable = _load(path)
        if executable is None:
            lowered = program.lower(**static, **dynamic)
            with _without_cache():
                executable = lowered.compile()
            _save(path, executable)
        return executable

    @functools.cached_property
    def _code(self) -> list[str]:
        """Hashes of the source code, computed once per engine."""
        return [_hash_files(source) for source in (jkv, *self.sources)]

    def _name_file(
        self, program: Any, static: dict[str, Any], dynamic: dict[str, Any]
    ) -> Path:
        leaves, tree = jax.tree.flatten(dynamic)
        made_of = [
            self.version,
            *self._code,
            # The repr of a model may differ between runs.
            *(f"{k}={v}" for k, v in sorted(static.items()) if k != _MODEL),
            str(tree),
            *(_describe(leaf) for leaf in leaves),
            *_describe_surroundings(),
        ]
        key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()
        return Path(self.folder) / f"{program.__name__}-{key}"


def _describe(leaf: Any) -> str:
    """Return the shape, dtype and placement that a program is compiled for."""
    kind = jax.typeof(leaf)
    placement = leaf.sharding if getattr(leaf, "committed", False) else None
    return f"{kind.shape} {kind.dtype} {kind.weak_type} {placement}"


def _describe_surroundings() -> list[str]:
    """Return the versions, devices and settings that a program is compiled for."""
    client = jax.local_devices()[0].client
    settings = {k: v for k, v in jax.config.values.items() if "cache" not in k}
    return [
        jax.__version__,
        client.platform_version,
        *(device.device_kind for device in jax.devices()),
        # Processors of one kind may lack instructions of another.
        platform.node(),
        f"{jax.process_index()} of {jax.process_count()}",
        os.environ.get("XLA_FLAGS", ""),
        os.environ.get(WRITE_SWITCH, ""),
        str(sorted(settings.items())),
    ]


def _hash_files(source: ModuleType) -> str:
    """Hash the Python files of a package, or the file of a module."""
    if not source.__file__:
        raise ValueError(
            f"sources must be modules with files, got {source.__name__}; omit it and "
            f"describe its code in version"
        )
    file = Path(source.__file__)
    is_package = hasattr(source, "__path__")
    files = sorted(file.parent.rglob("*.py")) if is_package else [file]
    found = hashlib.sha256()
    for each in files:
        found.update(f"{each.relative_to(file.parent)}\0".encode())
        found.update(each.read_bytes())
    return found.hexdigest()


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Disable JAX's own compilation cache in the context."""
    # On CPU, XLA serializes an executable loaded from that cache without its functions.
    was_enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    # JAX reads the setting once and remembers it.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()


def _load(path: Path) -> Any:
    """Return the executable of a file, or None if it is missing or unusable."""
    try:
        found: Any = pickle.loads(path.read_bytes())
        return serialize_executable.deserialize_and_load(*found)
    except OSError:
        return None
    except Exception as error:  # truncated, or built for another machine
        logger.warning("could not load %s, compiling it again: %s", path.name, error)
        path.unlink(missing_ok=True)
        return None


def _save(path: Path, executable: Any) -> None:
    """Write the executable atomically."""
    try:
        content = pickle.dumps(serialize_executable.serialize(executable))
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_oldest(path.parent)
        with replacing(path) as file:
            file.write(content)
    except Exception as error:  # an unpicklable tree, a full disk
        logger.warning("could not save %s: %s", path.name, error)
