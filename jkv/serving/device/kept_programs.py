"""Executables in a folder: a later run neither traces nor compiles its model.

JAX's own cache of compiled programs is asked with a program that was traced and
lowered, which takes Python longer than the rest of a start. Here the question is what
the program would be made of: the code, the shapes, the device and the settings. JAX and
jkv tell theirs; the code of the model has a version, which its author gives.

`jax.experimental.serialize_executable` makes bytes of an executable.
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
from jkv.commands.compiled_programs import remove_oldest
from jkv.storage.files import replacing
from jkv.verbs.writing import WRITE_SWITCH

logger = logging.getLogger("jkv.serving")

# The static argument whose code `KeptPrograms.version` stands for.
_MODEL = "model"


@dataclasses.dataclass(frozen=True)
class KeptPrograms:
    """Where an engine keeps executables, and for which model.

    Bytes in the folder are run as they are: only the user may be able to write there.

    Attributes:
      version: says which model it is, and changes whenever its code or anything changes
        that is neither an array nor the shape of one, such as a configuration. With a
        draft model it is for both.
      folder: where; a few megabytes for each engine, the oldest are removed beyond
        half a gigabyte.
      sources: modules and packages that models are made of: the content of their
        files is a part of the version.

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
        """Return the executable for arguments by name, kept from now on.

        It takes the dynamic ones, and has the shapes of its results, `out_info`.
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
        """What the code is, read once for all programs of an engine."""
        return [_hash_files(source) for source in (jkv, *self.sources)]

    def _name_file(
        self, program: Any, static: dict[str, Any], dynamic: dict[str, Any]
    ) -> Path:
        leaves, tree = jax.tree.flatten(dynamic)
        made_of = [
            self.version,
            *self._code,
            # A model has no text of its own that another run would find again.
            *(f"{k}={v}" for k, v in sorted(static.items()) if k != _MODEL),
            str(tree),
            *(_describe(leaf) for leaf in leaves),
            *_describe_surroundings(),
        ]
        key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()
        return Path(self.folder) / f"{program.__name__}-{key}"


class BoundProgram:
    """A program with its static arguments: as jit makes it, or from a folder."""

    def __init__(self, program: Any, kept: KeptPrograms | None, static: dict[str, Any]):
        self._program, self._kept, self._static = program, kept, static
        self._executable: Any = None

    def __call__(self, **dynamic: Any) -> Any:
        """Run it on its other arguments, always of the same shapes."""
        if self._kept is None:
            return self._program(**self._static, **dynamic)
        return self._find(self._kept, dynamic)(**dynamic)

    def find_shapes(self, **dynamic: Any) -> Any:
        if self._kept is None:
            program = functools.partial(self._program, **self._static)
            return jax.eval_shape(program, **dynamic)
        return self._find(self._kept, dynamic).out_info

    def _find(self, kept: KeptPrograms, dynamic: dict[str, Any]) -> Any:
        if self._executable is None:
            self._executable = kept.find(self._program, self._static, dynamic)
        return self._executable


def _describe(leaf: Any) -> str:
    """Say what a program is compiled for of an argument."""
    kind = jax.typeof(leaf)
    placement = leaf.sharding if getattr(leaf, "committed", False) else None
    return f"{kind.shape} {kind.dtype} {kind.weak_type} {placement}"


def _describe_surroundings() -> list[str]:
    """Say what a program is compiled for beside its arguments."""
    client = jax.local_devices()[0].client
    settings = {k: v for k, v in jax.config.values.items() if "cache" not in k}
    return [
        jax.__version__,
        client.platform_version,
        *(device.device_kind for device in jax.devices()),
        # One processor may lack what another one's instructions need.
        platform.node(),
        f"{jax.process_index()} of {jax.process_count()}",
        os.environ.get("XLA_FLAGS", ""),
        os.environ.get(WRITE_SWITCH, ""),
        str(sorted(settings.items())),
    ]


def _hash_files(source: ModuleType) -> str:
    """Hash the Python files of a package, or the one of a module."""
    if not source.__file__:
        raise ValueError(f"{source.__name__} has no files to know its code by")
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
    """Let nothing come from JAX's own cache of compiled programs meanwhile."""
    # XLA writes an executable that it has read itself without its functions, on a CPU.
    was_enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    # Whether there is a cache is asked once, and then remembered.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()


def _load(path: Path) -> Any:
    """Return the executable in a file; None where there is none that works."""
    try:
        found: Any = pickle.loads(path.read_bytes())
        return serialize_executable.deserialize_and_load(*found)
    except OSError:
        return None
    except Exception as error:  # half a file, another machine's instructions
        logger.warning("%s is compiled again: %s", path.name, error)
        path.unlink(missing_ok=True)
        return None


def _save(path: Path, executable: Any) -> None:
    """Write the executable as a whole or not at all."""
    try:
        content = pickle.dumps(serialize_executable.serialize(executable))
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_oldest(path.parent)
        with replacing(path) as file:
            file.write(content)
    except Exception as error:  # a tree that cannot be pickled, a full disk
        logger.warning("%s is not kept: %s", path.name, error)
