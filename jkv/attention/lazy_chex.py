"""chex, imported at the first assertion during tracing, not by `import jkv`.

Importing it takes longer than importing jkv. Used as `from ... import lazy_chex as
chex`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return an attribute of chex."""
    import chex

    return getattr(chex, name)
