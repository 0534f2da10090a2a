"""Run processes in parallel; print the output of each when it has ended."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import IO, NamedTuple

# pytest frames its last line, and may colour it.
FRAME = re.compile(r"^=+ | =+$|\x1b\[[\d;]*m")


class Job(NamedTuple):
    """A process to run."""

    name: str
    command: Sequence[str | pathlib.Path]
    variables: Mapping[str, str] = {}  # added to the inherited environment
    after: str | None = None  # job that must succeed first
    waits: bool = False  # mostly sleeps, and takes no processor from other jobs


class Outcome(NamedTuple):
    """Result of a process."""

    name: str
    status: int | None  # None if not run, since a preceding job failed
    last_line: str  # of the output
    seconds: float
    processor_seconds: float  # CPU time, with child processes


class Running(NamedTuple):
    """A running process."""

    job: Job
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    start: float


def run_jobs(jobs: Sequence[Job], width: int, folder: pathlib.Path) -> list[Outcome]:
    """Run all jobs, in order as far as possible.

    A failed job blocks only the jobs after it.

    Args:
      jobs: in the order of their start.
      width: number of concurrent processes; jobs that wait do not count.
      folder: working directory.

    Raises:
      KeyboardInterrupt: after all processes were killed.
    """
    waiting, running, outcomes = list(jobs), dict[int, Running](), list[Outcome]()
    try:
        while waiting or running:
            statuses = {outcome.name: outcome.status for outcome in outcomes}
            for job in list(waiting):
                if statuses.get(job.after or "", 0) != 0:
                    waiting.remove(job)
                    outcomes.append(Outcome(job.name, None, "not run", 0, 0))
                elif can_run(job, waiting, running, width):
                    waiting.remove(job)
                    with deferring_interrupts():
                        started = start(job, folder)
                        running[started.process.pid] = started
            if running:
                outcomes.append(await_one(running))
    except KeyboardInterrupt:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        raise
    return outcomes


def can_run(
    job: Job, waiting: list[Job], running: dict[int, Running], width: int
) -> bool:
    """Return True if the job's predecessor has ended and a processor is free."""
    started = [one.job for one in running.values()]
    is_free = job.waits or sum(not one.waits for one in started) < width
    return is_free and job.after not in [other.name for other in [*waiting, *started]]


@contextlib.contextmanager
def deferring_interrupts() -> Iterator[None]:
    """Defer interrupts, so that no started process goes unrecorded."""
    came: list[int] = []
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if callable(handler := signal.getsignal(number))
    }
    for number in handlers:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def start(job: Job, folder: pathlib.Path) -> Running:
    """Start a process in a session of its own, which can be killed as a whole."""
    print(f"[{time.strftime('%H:%M:%S')}] {job.name}: started", flush=True)
    output = tempfile.TemporaryFile()
    process = subprocess.Popen(
        job.command,
        cwd=folder,
        env=os.environ | job.variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return Running(job, process, output, time.monotonic())


def await_one(running: dict[int, Running]) -> Outcome:
    """Wait until a process ends, remove it from `running`, and print its output."""
    pid, status, usage = os.wait4(-1, 0)
    while pid not in running:
        pid, status, usage = os.wait4(-1, 0)
    one = running.pop(pid)
    one.process.returncode = os.waitstatus_to_exitcode(status)
    one.output.seek(0)
    text = one.output.read().decode(errors="replace").strip()
    one.output.close()
    outcome = Outcome(
        one.job.name,
        one.process.returncode,
        FRAME.sub("", text.rpartition("\n")[2]),
        time.monotonic() - one.start,
        usage.ru_utime + usage.ru_stime,
    )
    print(text, end="\n" if text else "")
    ended = "ended" if outcome.status == 0 else f"ended with status {outcome.status}"
    print(f"[{time.strftime('%H:%M:%S')}] {one.job.name}: {ended}", flush=True)
    return outcome


def show_table(outcomes: Sequence[Outcome], fine: Collection[int] = (0,)) -> bool:
    """Print a line per process; return True if all statuses are in `fine`."""
    names = max(len(outcome.name) for outcome in outcomes)
    print(f"\n{'':{names}}  seconds  processor")
    for outcome in outcomes:
        mark = "" if outcome.status in fine else "FAILED: "
        print(
            f"{outcome.name:{names}}  {outcome.seconds:7.1f}  "
            f"{outcome.processor_seconds:9.1f}  {mark}{outcome.last_line}"
        )
    return all(outcome.status in fine for outcome in outcomes)
