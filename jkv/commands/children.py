"""Child processes with a time limit, for checks that may crash or hang.

A child (`answer`) runs the checks named on its command line in turn, and prints a
result for each. After a crash or a hang, a new child runs the rest. Children are killed
with all their descendants, and exit when this process is killed.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from jkv.commands.report import Try, judge, say


class Answer(NamedTuple):
    """Result of one check; verdicts are as for `Report.add`."""

    name: str
    verdict: str
    detail: str
    facts: dict[str, Any] = {}


def ask(
    command: Sequence[str],
    names: Sequence[str],
    find_limit: Callable[[], float],
    environment: Mapping[str, str] | None = None,
) -> Iterator[Answer]:
    """Yield the children's result for each name, each within `find_limit()` seconds."""
    left = list(names)
    preallocate = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    while left and find_limit() > 0:
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            child = subprocess.Popen(
                [*command, *left],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
                env=os.environ | preallocate | dict(environment or {}),
            )
            try:
                for found in _listen(child, left, find_limit, output):
                    left.pop(0)
                    yield found
            finally:
                _kill(child)
    for name in left:
        yield Answer(name, "not checked", "the time is over")


def answer(tries: Mapping[str, Try], names: Sequence[str]) -> None:
    """Run the named checks in a child, and print the result of each."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in names:
        verdict, found = judge(tries[name])
        facts = found if isinstance(found, dict) else {}
        line = {"verdict": verdict, "detail": say(found), "facts": facts}
        print(json.dumps(line), flush=True)


def _listen(
    child: "subprocess.Popen[str]",
    names: Sequence[str],
    find_limit: Callable[[], float],
    output: IO[str],
) -> Iterator[Answer]:
    """Yield a child's results; the last is a failure if the child ended."""
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
    for name in list(names):
        limit, line = find_limit(), " "
        while line and not line.startswith("{"):
            try:
                line = lines.get(timeout=max(limit, 0.0))
            except queue.Empty:
                detail = f"no answer in {limit:.0f} s: it hangs"
                yield Answer(name, "FAILED", detail)
                return
        if not line:
            yield Answer(name, "FAILED", _describe_end(child, output))
            return
        yield Answer(name, **json.loads(line))


def _describe_end(child: "subprocess.Popen[str]", output: IO[str]) -> str:
    """Describe the end of a child that printed no result."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=1.0)
    output.seek(0)
    lines = [line.strip() for line in output if line.strip()][-3:]
    status = child.returncode
    if status is not None and status < 0:
        return " | ".join([f"crashed: {signal.Signals(-status).name}", *lines])
    return lines[-1] if lines else f"its process ended with status {status}"


def _read(stream: IO[str], lines: "queue.Queue[str]") -> None:
    """Queue each line as it arrives, and an empty one at the end."""
    with contextlib.suppress(ValueError), stream:
        for line in stream:
            lines.put(line)
    lines.put("")


def _kill(child: "subprocess.Popen[str]") -> None:
    """Kill a child and its descendants; one blocked in a driver may stay."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=2.0)
    if child.stdin is not None:
        child.stdin.close()


def _end_with_parent() -> None:
    """Exit when the parent process closes the pipe."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdin.read()
    os._exit(1)
