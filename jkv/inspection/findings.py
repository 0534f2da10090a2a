"""What debug mode has found: kept on the host, logged at once, raised by `check`."""

import logging
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from jkv.status import CacheError

logger = logging.getLogger("jkv")

PACKAGE = str(pathlib.Path(__file__).parent.parent)


class DebugError(CacheError):
    """Debug mode found mistakes; the message names each, and where it was made.

    Attributes:
      findings: what was found, a text each.

    Example:
      >>> import jkv
      >>> issubclass(jkv.DebugError, jkv.CacheError)
      True
    """

    def __init__(self, findings: list[str]) -> None:
        super().__init__("\n".join(findings))
        self.findings = findings


class Watch:
    """What the host knows of a cache in debug mode, of which it is a static part."""

    def __init__(self, keys: list[jax.Array]) -> None:
        self.keys = keys  # the keys of each group, as they were seen last
        self.found: dict[str, int] = {}

    def note(self, text: str, where: str, is_wrong: Any) -> None:
        """Note a mistake at a line, if it was made."""
        if np.any(is_wrong):
            finding = f"{where}: {text}"
            if finding not in self.found:
                logger.error("%s", finding)
            self.found[finding] = self.found.get(finding, 0) + 1

    def watch_copies(self, keys: list[jax.Array]) -> None:
        """Note whether a pool has moved while the old one lived on."""
        for pool, old in zip(keys, self.keys, strict=True):
            if pool is not old and not old.is_deleted() and old.size:
                text = (
                    "the pool was copied, as the cache was not donated: jit the step "
                    "with donate_argnames='cache', and call verbs that write inside it"
                )
                self.note(text, "since the last check", True)
                break
        self.keys = keys

    def take_findings(self) -> list[str]:
        """Return what was found, and begin anew."""
        jax.effects_barrier()
        found, self.found = self.found, {}
        return [f"{text} ({n} times)" for text, n in found.items()]


def is_called_from_outside(depth: int) -> bool:
    """Return whether the frame so many calls above is outside of this package."""
    return not sys._getframe(1 + depth).f_code.co_filename.startswith(PACKAGE)


def find_caller() -> str:
    """Return file and line of the innermost frame outside this package and JAX."""
    frame = sys._getframe(1)
    skipped = (PACKAGE, str(pathlib.Path(jax.__file__).parent))
    while frame.f_back and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
