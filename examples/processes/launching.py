"""Launcher of processes: start, monitor, restart, and report failures."""

import argparse
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, NamedTuple

# Seconds beyond the heartbeat timeout in which the others may exit after a failure;
# then they are killed.
SECONDS_TO_END = 5


class Child(NamedTuple):
    """A started process."""

    number: int
    process: subprocess.Popen[bytes]
    log: pathlib.Path  # its output
    reader: threading.Thread | None  # copies process 0's standard output


def launch(options: argparse.Namespace, listener: socket.socket | None = None) -> int:
    """Start processes, and restart them after failures up to `--restarts` times.

    Args:
        options: command-line options.
        listener: the socket for clients of the first process, passed as `--listener`.
            During a restart, requests wait in its backlog.

    Returns:
        The exit status; 0 if all processes succeeded.
    """
    pathlib.Path(options.state).mkdir(parents=True, exist_ok=True)
    # Handlers only record signals: an exception might lose a new child.
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(number))
    for attempt in range(options.restarts + 1):
        if attempt:
            report(f"starting again, {attempt} of {options.restarts}")
        children: list[Child] = []
        try:
            start(options, children, listener)
            if watch(children, options.heartbeat + SECONDS_TO_END, signals):
                return 0
        finally:
            kill(children)
    report("the same command goes on from what was saved")
    return 1


def start(
    options: argparse.Namespace,
    children: list[Child],
    listener: socket.socket | None = None,
) -> None:
    """Start all processes; the first is the coordinator.

    Each is added to `children` as soon as it runs, so that later errors cannot leak it.
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
        report(f"process {number} has pid {process.pid}")
        children.append(Child(number, process, log, reader))


def watch(children: list[Child], patience: float, signals: list[int]) -> bool:
    """Wait until all processes exit, but at most `patience` seconds after a failure.

    Raises SystemExit after a signal.

    Returns:
        Whether all processes succeeded.
    """
    began, failed = time.monotonic(), None
    waiting = list(children)
    while waiting:
        time.sleep(0.05)
        if signals:
            report(f"ended by {signal.Signals(signals[0]).name}")
            sys.exit(128 + signals[0])
        now = time.monotonic()
        for child in [each for each in waiting if each.process.poll() is not None]:
            waiting.remove(child)
            if child.process.returncode == 0:
                continue
            how = describe(child.process.returncode)
            after = f"after {now - began:.1f} s"
            if failed is not None:
                after = f"{now - failed:.1f} s later"
            report(f"process {child.number} {how} {after}; see {child.log}")
            failed = failed or now
        if failed is not None and now - failed > patience:
            for child in waiting:
                report(f"process {child.number} still runs {patience} s later: killed")
            return False
    return failed is None


def pass_on(output: IO[bytes]) -> None:
    """Copy a process's output to ours, without the messages of Gloo."""
    for line in output:
        if b"connected peer ranks" not in line:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()


def describe(status: int) -> str:
    """Describe an exit status."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def kill(children: list[Child]) -> None:
    """Kill all running processes."""
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
        child.process.wait()
        if child.reader:
            child.reader.join()


def report(text: str) -> None:
    """Print a message immediately."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)
