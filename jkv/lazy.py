"""Lazy imports of a package's names (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def imports_later(
    package: str, homes: Mapping[str, str], modules: tuple[str, ...] = ()
) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports names on first access.

    Type checkers read the same imports under `if TYPE_CHECKING`.

    Args:
      package: its `__name__`.
      homes: space-separated names, by the module that defines them.
      modules: submodules to import as attributes.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
