"""What the doctor found, printed as it comes, and how much is still to be done."""

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
from collections.abc import Callable
from typing import Any

from jkv.commands.ending import FAILED, INTERRUPTED

# Of a text in a written report, what is longer is cut.
MOST_LETTERS = 2000

_PATH = re.compile(
    r"(?<![\w/.-])(?:[A-Za-z]:[\\/]|~?/|\.\.?/)[\w.+@~-]+(?:[\\/][\w.+@~-]*)+"
)


@dataclasses.dataclass
class Report:
    """Facts about the machine, and a finding for each check."""

    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    findings: list[dict[str, str]] = dataclasses.field(default_factory=list)
    was_interrupted: bool = False

    def add(self, verdict: str, what: str, detail: str = "") -> None:
        """Note a finding: "ok", "FAILED", "warning" or "not checked"."""
        self.findings.append({"verdict": verdict, "what": what, "detail": detail})
        print(f"  {verdict:<12}{what}{': ' if detail else ''}{detail}", flush=True)

    @property
    def has_failed(self) -> bool:
        """Whether any check failed."""
        return any(each["verdict"] == "FAILED" for each in self.findings)

    @property
    def exit_status(self) -> int:
        """What the command ends with."""
        if self.was_interrupted:
            return INTERRUPTED
        return FAILED if self.has_failed else 0

    @property
    def summary(self) -> str:
        """The last line: whether something failed, of what was checked."""
        if self.was_interrupted:
            so_far = "something FAILED" if self.has_failed else "nothing had failed"
            return f"INTERRUPTED: not all was checked; {so_far} until then"
        return "SOMETHING FAILED" if self.has_failed else "nothing failed"

    def write(self, path: pathlib.Path) -> None:
        """Write all of it to a file, or say why that is not possible."""
        try:
            path.write_text(
                json.dumps(clean(dataclasses.asdict(self)), indent=1) + "\n"
            )
            print(f"written to {path}")
        except OSError as error:
            print(f"not written: {error}", file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class Step:
    """A part of the examination; its cost is in seconds, roughly."""

    title: str
    cost: int
    run: Callable[[Report], None]


def run_checks(report: Report, steps: list[Step]) -> None:
    """Run all steps, each under its title with the time that is left, roughly.

    Ctrl-C ends them early: what was not reached is noted as not checked.
    """
    began, done = time.monotonic(), 0
    total = sum(step.cost for step in steps)
    for number, step in enumerate(steps, 1):
        left = ""
        if done:
            seconds = (time.monotonic() - began) * (total - done) / done
            left = f", about {say_duration(seconds)} left"
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
    """Return what is reported without paths, the user's name and the machine's."""
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
    """Return names of the machine and of its user, if they say anything."""
    with contextlib.suppress(OSError, KeyError):  # where no user is known
        return tuple(n for n in (getpass.getuser(), platform.node()) if len(n) > 1)
    return ()


def say_duration(seconds: float) -> str:
    """Say how long something takes, no more exactly than one can know."""
    if seconds < 90:
        return f"{max(5 * round(seconds / 5), 5)} s"
    return f"{round(seconds / 60)} min"
