"""Report of the doctor's results and progress, printed as they arrive."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import getpass
import json
import os
import pathlib
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jkv.commands.exiting import FAILED, INTERRUPTED

# Longer strings are truncated in a written report.
MOST_LETTERS = 2000
# Comparisons compile on this many threads at most, each with a program in memory.
MOST_THREADS = 16
PROGRESS_SECONDS = 15  # between lines of progress
LEAST_SHARE = 0.1  # of the comparisons, before their rate is an estimate

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


# Result of a check by name, as `judge` returns it.
Judged: TypeAlias = tuple[str, tuple[str, Any]]


@dataclasses.dataclass(frozen=True)
class Step:
    """A group of checks."""

    title: str
    checks: Callable[[Report], None] | Mapping[str, Try]
    of: str = ""  # common name, for reporting successful checks in one line

    @property
    def comparisons(self) -> Mapping[str, Try]:
        """Independent checks that mostly compile, and may run side by side."""
        return {} if callable(self.checks) or not self.of else self.checks

    def run(self, report: Report) -> None:
        """Run the checks in order, and add each result."""
        if callable(self.checks):
            self.checks(report)
        else:
            for name, attempt in self.checks.items():
                verdict, found = judge(attempt)
                report.add(verdict, name, say(found))

    def add_together(self, report: Report, judged: Iterable[Judged]) -> None:
        """Add each failure, and all successes in one line."""
        refused: dict[str, list[str]] = {}
        agreed = []
        for name, (verdict, found) in judged:
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


class Comparisons:
    """The comparisons of several steps, run side by side in threads.

    Compiling takes nearly all of their time, and releases Python's lock. Comparisons of
    all steps are mixed evenly, so that the number of those done tells the time left.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        """Start the comparisons."""
        threads = min(os.cpu_count() or 1, MOST_THREADS)
        self._executor = concurrent.futures.ThreadPoolExecutor(threads)
        self._began = time.monotonic()
        order = sorted(
            ((index + 0.5) / len(step.comparisons), number, name)
            for number, step in enumerate(steps)
            for index, name in enumerate(step.comparisons)
        )
        self._futures: dict[tuple[str, str], concurrent.futures.Future[Any]] = {
            (steps[number].title, name): self._executor.submit(
                judge, steps[number].comparisons[name]
            )
            for _, number, name in order
        }

    def results_of(self, step: Step) -> Iterator[Judged]:
        """Wait for the results of a step, and print how many of all are there."""
        for name in step.comparisons:
            future = self._futures[step.title, name]
            while not concurrent.futures.wait([future], timeout=PROGRESS_SECONDS).done:
                print(f"  {self.progress}", flush=True)
            yield name, future.result()

    @property
    def num_done(self) -> int:
        """Number of comparisons that have ended."""
        return sum(each.done() for each in self._futures.values())

    @property
    def time_left(self) -> str:
        """The estimated time until the last one ends; empty without an estimate."""
        done, total = self.num_done, len(self._futures)
        if done == total or done < LEAST_SHARE * total:
            return ""
        seconds = (time.monotonic() - self._began) * (total - done) / done
        return f", about {format_duration(seconds)} left"

    @property
    def progress(self) -> str:
        """Number of comparisons done, and the time left."""
        return f"{self.num_done} of {len(self._futures)} comparisons{self.time_left}"

    def stop(self) -> None:
        """Cancel the comparisons that have not started; do not wait for the others."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def run_checks(report: Report, steps: list[Step]) -> None:
    """Run all steps in order, printing each title; comparisons run side by side.

    Ctrl-C ends the run early; the remaining steps are reported as not checked.
    """
    comparisons: Comparisons | None = None
    with contextlib.ExitStack() as stack:
        for number, step in enumerate(steps, 1):
            if step.comparisons and comparisons is None:
                comparisons = Comparisons([each for each in steps if each.comparisons])
                stack.callback(comparisons.stop)
            left = "" if comparisons is None else comparisons.time_left
            print(f"{step.title} ({number} of {len(steps)}{left})", flush=True)
            before = len(report.findings)
            try:
                if step.comparisons and comparisons is not None:
                    step.add_together(report, comparisons.results_of(step))
                else:
                    step.run(report)
            except KeyboardInterrupt:
                report.was_interrupted = True
                for missed in steps[number - 1 :]:
                    report.add("not checked", missed.title, "interrupted")
                return
            finally:
                for finding in report.findings[before:]:
                    finding["step"] = step.title


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
