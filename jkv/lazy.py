"""Names that a package has before it has imported them (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def imports_later(
    package: str, homes: Mapping[str, str], modules: tuple[str, ...] = ()
) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports a name when it is asked for.

    Type checkers read the same imports under `if TYPE_CHECKING`.

    Args:
      package: its `__name__`.
      homes: names, divided by blanks, by the module that has them.
      modules: of the package, that are found as its attributes too.
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
