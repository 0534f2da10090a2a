"""Start and watch processes; report why one ended too early."""

import argparse
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, NamedTuple

# How long after the first failure the others may take to notice it, beside the time
# after which a process counts as dead. Then they are killed.
SECONDS_TO_END = 5


class Child(NamedTuple):
    """A process that was started."""

    number: int
    process: subprocess.Popen[bytes]
    log: pathlib.Path  # its output
    reader: (
        threading.Thread | None
    )  # of process 0's standard output, which goes to ours


def launch(options: argparse.Namespace, listener: socket.socket | None = None) -> int:
    """Start processes until they are done, or have failed once too often.

    Args:
        options: of the command line.
        listener: the socket for clients of the first process, passed to it as
            `--listener`. Requests during a restart wait there, and are answered then.

    Returns:
        The exit status, 0 when all is done.
    """
    pathlib.Path(options.state).mkdir(parents=True, exist_ok=True)
    # Noted alone: an exception could come between a child's start and its entry here.
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.append(number))
    for attempt in range(options.restarts + 1):
        if attempt:
            say(f"starting again, {attempt} of {options.restarts}")
        children: list[Child] = []
        try:
            start(options, children, listener)
            if watch(children, options.heartbeat + SECONDS_TO_END, asked):
                return 0
        finally:
            kill(children)
    say("the same command goes on from what was saved")
    return 1


def start(
    options: argparse.Namespace,
    children: list[Child],
    listener: socket.socket | None = None,
) -> None:
    """Start all processes; the first is the one that the others report to.

    Each is on the list as soon as it runs, so that it is ended after any later error.
    """
    with socket.create_server(("localhost", 0)) as server:
        coordinator = f"localhost:{server.getsockname()[1]}"
    for number in range(options.num_processes):
        log = pathlib.Path(options.state, f"process-{number}.log")
        membership = ["--coordinator", coordinator, "--process", str(number)]
        inherited = []
        if listener is not None and number == 0:
            inherited = [listener.fileno()]
            membership += ["--listener", str(inherited[0])]
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, *sys.argv, *membership],
                stdout=subprocess.PIPE if number == 0 else file,
                stderr=file,
                pass_fds=inherited,
            )
        reader = None
        if process.stdout:
            reader = threading.Thread(target=pass_on, args=[process.stdout])
            reader.start()
        say(f"process {number} has pid {process.pid}")
        children.append(Child(number, process, log, reader))


def watch(children: list[Child], patience: float, asked: list[int]) -> bool:
    """Wait until all have ended; after the first failure, no longer than `patience`.

    A signal that requests an end raises SystemExit.

    Returns:
        Whether all have done their work.
    """
    began, failed = time.monotonic(), None
    waiting = list(children)
    while waiting:
        time.sleep(0.05)
        if asked:
            say(f"ended by {signal.Signals(asked[0]).name}")
            sys.exit(128 + asked[0])
        now = time.monotonic()
        for child in [each for each in waiting if each.process.poll() is not None]:
            waiting.remove(child)
            if child.process.returncode == 0:
                continue
            how = describe(child.process.returncode)
            after = f"after {now - began:.1f} s"
            if failed is not None:
                after = f"{now - failed:.1f} s later"
            say(f"process {child.number} {how} {after}; see {child.log}")
            failed = failed or now
        if failed is not None and now - failed > patience:
            for child in waiting:
                say(f"process {child.number} still runs {patience} s later: killed")
            return False
    return failed is None


def pass_on(output: IO[bytes]) -> None:
    """Write the output of a process to ours, but for the greetings of Gloo."""
    for line in output:
        if b"connected peer ranks" not in line:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()


def describe(status: int) -> str:
    """Say how a process ended."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def kill(children: list[Child]) -> None:
    """End all running processes."""
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
        child.process.wait()
        if child.reader:
            child.reader.join()


def say(text: str) -> None:
    """Tell the user, at once."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)
