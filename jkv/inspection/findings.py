"""Findings of debug mode: stored on the host, logged at once, raised by `check`."""

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
    """Misuse found by debug mode; the message has each finding and its call site.

    Attributes:
      findings: one message each.

    Example:
      >>> import jkv
      >>> issubclass(jkv.DebugError, jkv.CacheError)
      True
    """

    def __init__(self, findings: list[str]) -> None:
        super().__init__("\n".join(findings))
        self.findings = findings


class Watch:
    """Host state of debug mode, a static field of a watched cache."""

    def __init__(self, keys: list[jax.Array]) -> None:
        self.keys = keys  # pools of each group at the last check
        self.found: dict[str, int] = {}

    def note(self, text: str, where: str, is_wrong: Any) -> None:
        """Record and log a finding at a call site if `is_wrong`."""
        if np.any(is_wrong):
            finding = f"{where}: {text}"
            if finding not in self.found:
                logger.error("%s", finding)
            self.found[finding] = self.found.get(finding, 0) + 1

    def watch_copies(self, keys: list[jax.Array]) -> None:
        """Record a finding if a pool was copied while the old one is alive."""
        for pool, old in zip(keys, self.keys, strict=True):
            if pool is not old and not old.is_deleted() and old.size:
                text = (
                    "the pool was copied, as the cache was not donated; jit the step "
                    "with donate_argnames='cache', and call verbs that write inside it"
                )
                self.note(text, "since the last check", True)
                break
        self.keys = keys

    def take_findings(self) -> list[str]:
        """Return the findings and clear them."""
        jax.effects_barrier()
        found, self.found = self.found, {}
        return [f"{text} ({n} times)" for text, n in found.items()]


def is_called_from_outside(depth: int) -> bool:
    """Return True if the frame `depth` calls above is outside this package."""
    return not sys._getframe(1 + depth).f_code.co_filename.startswith(PACKAGE)


def find_caller() -> str:
    """Return file and line of the innermost frame outside this package and JAX."""
    frame = sys._getframe(1)
    skipped = (PACKAGE, str(pathlib.Path(jax.__file__).parent))
    while frame.f_back and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
