"""Report of the doctor's results and progress, printed as they arrive."""

import contextlib
import dataclasses
import functools
import getpass
import json
import pathlib
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jkv.commands.exiting import FAILED, INTERRUPTED

# Longer strings are truncated in a written report.
MOST_LETTERS = 2000

_PATH = re.compile(
    r"(?<![\w/.-])(?:[A-Za-z]:[\\/]|~?/|\.\.?/)[\w.+@~-]+(?:[\\/][\w.+@~-]*)+"
)


# Returns a result, raises `NotImplementedError` if the check does not apply, and
# another error for a failure.
Try: TypeAlias = Callable[[], Any]


def judge(attempt: Try) -> tuple[str, Any]:
    """Run a check; return "ok" and its result, or another verdict and the reason."""
    try:
        return "ok", attempt()
    except NotImplementedError as reason:
        return "not checked", str(reason)
    except Exception as error:
        return "FAILED", f"{type(error).__name__}: {error}"


def say(found: Any) -> str:
    """Return a result as a string, empty for facts, which are reported separately."""
    if isinstance(found, float):
        return f"{found:.1e}"
    return found if isinstance(found, str) else ""


@dataclasses.dataclass
class Report:
    """Facts about the machine, and a finding for each check."""

    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    findings: list[dict[str, str]] = dataclasses.field(default_factory=list)
    was_interrupted: bool = False

    def add(self, verdict: str, what: str, detail: str = "") -> None:
        """Add and print a finding: "ok", "FAILED", "warning" or "not checked"."""
        self.findings.append({"verdict": verdict, "what": what, "detail": detail})
        print(f"  {verdict:<12}{what}{': ' if detail else ''}{detail}", flush=True)

    @property
    def has_failed(self) -> bool:
        """True if any check failed."""
        return any(each["verdict"] == "FAILED" for each in self.findings)

    @property
    def exit_status(self) -> int:
        """Exit status of the command."""
        if self.was_interrupted:
            return INTERRUPTED
        return FAILED if self.has_failed else 0

    @property
    def summary(self) -> str:
        """Last line of the output: the overall result."""
        if self.was_interrupted:
            so_far = "something FAILED" if self.has_failed else "nothing had failed"
            return f"INTERRUPTED: not all was checked; {so_far} until then"
        return "SOMETHING FAILED" if self.has_failed else "nothing failed"

    def write(self, path: pathlib.Path) -> None:
        """Write the report to a file, or print the reason for a failure."""
        try:
            path.write_text(
                json.dumps(clean(dataclasses.asdict(self)), indent=1) + "\n"
            )
            print(f"written to {path}")
        except OSError as error:
            print(f"could not write the report: {error}", file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class Step:
    """A group of checks."""

    title: str
    cost: int  # rough seconds
    checks: Callable[[Report], None] | Mapping[str, Try]
    of: str = ""  # common name, for reporting successful checks in one line

    def run(self, report: Report) -> None:
        if callable(self.checks):
            self.checks(report)
        elif self.of:
            self._run_together(report, self.checks)
        else:
            for name, attempt in self.checks.items():
                verdict, found = judge(attempt)
                report.add(verdict, name, say(found))

    def _run_together(self, report: Report, tries: Mapping[str, Try]) -> None:
        """Report each failure, and all successes in one line."""
        refused: dict[str, list[str]] = {}
        agreed = []
        for name, attempt in tries.items():
            verdict, found = judge(attempt)
            if verdict == "FAILED":
                report.add(verdict, f"{self.of}, {name}", found)
            elif verdict == "ok":
                agreed.append(found)
            else:
                refused.setdefault(found, []).append(name)
        for why, names in refused.items():
            report.add("not checked", f"{self.of}: {', '.join(names)}", why)
        if agreed:
            report.add("ok", f"{self.of}: {len(agreed)} cases", say(max(agreed)))


def run_checks(report: Report, steps: list[Step]) -> None:
    """Run all steps, printing each title with the estimated time left.

    Ctrl-C ends the run early; the remaining steps are reported as not checked.
    """
    began, done = time.monotonic(), 0
    total = sum(step.cost for step in steps)
    for number, step in enumerate(steps, 1):
        left = ""
        if done:
            seconds = (time.monotonic() - began) * (total - done) / done
            left = f", about {format_duration(seconds)} left"
        print(f"{step.title} ({number} of {len(steps)}{left})", flush=True)
        before = len(report.findings)
        try:
            step.run(report)
        except KeyboardInterrupt:
            report.was_interrupted = True
            for missed in steps[number - 1 :]:
                report.add("not checked", missed.title, "interrupted")
            return
        finally:
            for finding in report.findings[before:]:
                finding["step"] = step.title
        done += step.cost


def clean(value: Any) -> Any:
    """Return a value without paths, user name and machine name."""
    if isinstance(value, dict):
        return {name: clean(each) for name, each in value.items()}
    if isinstance(value, list):
        return [clean(each) for each in value]
    if not isinstance(value, str):
        return value
    value = _PATH.sub("<path>", value)
    for name in _find_names():
        value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", value)
    return value if len(value) <= MOST_LETTERS else f"{value[:MOST_LETTERS]} ..."


@functools.cache
def _find_names() -> tuple[str, ...]:
    """Return the names of the user and the machine, unless too short to matter."""
    with contextlib.suppress(OSError, KeyError):  # without a known user
        return tuple(n for n in (getpass.getuser(), platform.node()) if len(n) > 1)
    return ()


def format_duration(seconds: float) -> str:
    """Return a duration rounded for reading."""
    if seconds < 90:
        return f"{max(5 * round(seconds / 5), 5)} s"
    return f"{round(seconds / 60)} min"
