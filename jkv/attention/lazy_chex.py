"""chex, imported by the first assertion: when something is traced, not by `import jkv`.

Importing it takes longer than all of jkv. Used as `from ... import lazy_chex as chex`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return what chex has of this name."""
    import chex

    return getattr(chex, name)
