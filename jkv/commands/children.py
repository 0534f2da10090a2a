"""What may crash or hang is tried in child processes, each with a limit to its time.

A child (`answer`) tries what its command line names, in turn, and prints an answer to
each. After a crash or a hang a new child tries the rest. Children are killed with all
that they started, and end by themselves where this process is killed.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

# Of what a child says on stderr, the end is kept.
MOST_LINES = 30


class Answer(NamedTuple):
    """What came of one name; verdicts are those of `Report.add`."""

    name: str
    verdict: str
    detail: str
    facts: dict[str, Any]


def ask(
    command: Sequence[str],
    names: Sequence[str],
    find_limit: Callable[[], float],
    environment: Mapping[str, str] | None = None,
) -> Iterator[Answer]:
    """Yield an answer to each name, in order.

    Args:
      command: of a child, before the names.
      names: what to try.
      find_limit: gives the seconds that the next answer may take.
      environment: what differs from this process's variables.
    """
    left = list(names)
    while left:
        if find_limit() <= 0:
            yield Answer(left.pop(0), *_say_late(0), {})
            continue
        with _started([*command, *left], environment or {}) as (lines, errors, end):
            while left:
                limit = find_limit()
                try:
                    line = lines.get(timeout=max(limit, 0.0))
                except queue.Empty:
                    yield Answer(left.pop(0), *_say_late(limit), {})
                    break
                if not line:
                    yield Answer(left.pop(0), "FAILED", _say_end(end(), errors), {})
                    break
                if line.startswith("{"):
                    yield Answer(left.pop(0), **json.loads(line))


def answer(tries: Mapping[str, Callable[[], Any]], names: Sequence[str]) -> None:
    """Try names in turn, as a child: print whether each raised, and what it gave."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in names:
        verdict, detail = "ok", ""
        facts: dict[str, Any] = {}
        try:
            found = tries[name]()
            if isinstance(found, dict):
                facts = found
            else:
                detail = found or ""
        except NotImplementedError as reason:
            verdict, detail = "not checked", str(reason)
        except Exception as error:
            verdict, detail = "FAILED", f"{type(error).__name__}: {error}"
        line = {"verdict": verdict, "detail": detail, "facts": facts}
        print(json.dumps(line), flush=True)


def kill(child: "subprocess.Popen[str]") -> None:
    """End a child and all that it started."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    # One that hangs in a driver may stay; it is not waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=2.0)


@contextlib.contextmanager
def _started(
    command: list[str], environment: Mapping[str, str]
) -> Iterator[tuple["queue.Queue[str]", list[str], Callable[[], int | None]]]:
    """Start a child; give what it prints, what it says, and how it ended."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | dict(environment),
    )
    lines: queue.Queue[str] = queue.Queue()
    errors: list[str] = []
    readers = [
        threading.Thread(target=_read, args=each, daemon=True)
        for each in ((child.stdout, lines.put), (child.stderr, errors.append))
    ]
    for reader in readers:
        reader.start()

    def end() -> int | None:
        readers[1].join(timeout=1.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=1.0)
        return child.returncode

    try:
        yield lines, errors, end
    finally:
        kill(child)
        for reader in readers:
            reader.join(timeout=1.0)
        if child.stdin is not None:
            child.stdin.close()


def _say_late(limit: float) -> tuple[str, str]:
    if limit <= 0:
        return "not checked", "the time is over"
    return "FAILED", f"no answer in {limit:.0f} s: it hangs"


def _say_end(status: int | None, errors: Sequence[str]) -> str:
    """Say how a child ended that did not answer."""
    said = [line.strip() for line in errors[-MOST_LINES:] if line.strip()]
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        return " | ".join([f"crashed: {name}", *said[-3:]])
    return said[-1] if said else f"its process ended with status {status}"


def _read(stream: IO[str], take: Callable[[str], object]) -> None:
    """Pass on each line as it comes, and an empty one at the end."""
    with contextlib.suppress(ValueError), stream:
        for line in stream:
            take(line)
    take("")


def _end_with_parent() -> None:
    """Wait until the process that asks is gone."""
    with contextlib.suppress(OSError, ValueError):
        while sys.stdin.readline():
            pass
    os._exit(1)
