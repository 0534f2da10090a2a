"""What debug mode has found: kept on the host, logged at once, raised by `check`."""

import collections
import logging
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from jkv.status import CacheError, Status

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
        """Keep the findings beside the message."""
        super().__init__("\n".join(findings))
        self.findings = findings


class Site:
    """A call that answers with statuses, and whether anything ever looked at them.

    It travels with the answer as a static part, through jit too. All sites are equal,
    so that answers of several calls can take turns in a loop's carry.
    """

    def __init__(self, name: str, where: str) -> None:
        """Nothing was refused yet, and the status was not looked at."""
        self.name, self.where = name, where
        self.is_seen = False
        self.refusals: collections.Counter[str] = collections.Counter()

    def __eq__(self, other: object) -> bool:
        """Say yes to any site."""
        return isinstance(other, Site)

    def __hash__(self) -> int:
        """Return the same for all sites."""
        return hash(Site)

    def note(self, status: Any) -> None:
        """Count the refused requests of a call."""
        codes = np.ravel(status)
        self.refusals.update(Status(code).name for code in codes[codes != 0].tolist())


class Watch:
    """What is known on the host of a cache in debug mode; another one is another cache.

    It is a static part of the cache: what is traced in debug mode is compiled for it.
    """

    def __init__(self, keys: list[jax.Array]) -> None:
        """Nothing was found yet."""
        self.keys = keys  # the keys of each group, as they were seen last
        self.found: dict[str, int] = {}
        self.sites: list[Site] = []

    def note(self, text: str, where: str, is_wrong: Any) -> None:
        """Note a mistake at a line, if it was made."""
        if np.any(is_wrong):
            finding = f"{where}: {text}"
            if finding not in self.found:
                logger.error("%s", finding)
            self.found[finding] = self.found.get(finding, 0) + 1

    def watch_status(self, name: str, where: str, status: jax.Array) -> Site:
        """Return the site of a call, which counts what the call refuses."""
        site = Site(name, where)
        self.sites.append(site)
        jax.debug.callback(site.note, status)
        return site

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
        for site in self.sites:
            if site.refusals and not site.is_seen:
                refused = ", ".join(f"{n} {name}" for name, n in site.refusals.items())
                text = (
                    f"{site.name} refused requests ({refused}) and nothing looked at "
                    f"the status of its result: compare it with jkv.Status.OK, or pass "
                    f"it to raise_for_status"
                )
                self.note(text, site.where, True)
            site.refusals.clear()
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
