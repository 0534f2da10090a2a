"""Scripts that run as several processes of one job, each with devices of its own."""

import os
import pathlib
import socket
import subprocess
import sys
import threading

TESTS = pathlib.Path(__file__).parents[1]
SECONDS = 300  # for all that a test starts; far more than it takes


def start(*command):
    """Start Python with as many devices as its script asks for."""
    flags = os.environ["XLA_FLAGS"].split()
    flags = [flag for flag in flags if "device_count" not in flag]
    paths = str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")
    changes = {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=os.environ | changes,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def find_port():
    """A port that nothing listens on."""
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def run_pair(script, *arguments):
    """Run a script as processes 0 and 1 of a job; each says at its end that it is done.

    It takes its number, a port, and the arguments.
    """
    port = find_port()
    pair = [start(script, process, port, *arguments) for process in (0, 1)]
    said = ["", ""]

    def read(number):
        said[number], _ = pair[number].communicate()
        if pair[number].returncode != 0:
            pair[1 - number].kill()  # which would wait for it

    readers = [threading.Thread(target=read, args=[number]) for number in (0, 1)]
    for reader in readers:
        reader.start()
    try:
        for reader in readers:
            reader.join(timeout=SECONDS)
    finally:
        for process in pair:
            process.kill()
        for reader in readers:
            reader.join()
    is_done = ["done" in each for each in said]
    codes = [process.returncode for process in pair]
    assert all(is_done) and codes == [0, 0], "\n".join([*said, str(codes)])
