"""Scripts that run as several processes of one job, each with its own devices."""

import os
import pathlib
import socket
import subprocess
import sys
import threading

TESTS = pathlib.Path(__file__).parents[2]
SECONDS = 300  # for all processes of a test; far above the usual time


def start(*command):
    """Start Python with the number of devices that the script sets."""
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
    """Return a free port."""
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def run_pair(script, *arguments):
    """Run a script as processes 0 and 1 of a job; assert that each prints "done".

    Its arguments are the process number, a port, and `arguments`.
    """
    port = find_port()
    pair = [start(script, process, port, *arguments) for process in (0, 1)]
    output = ["", ""]

    def read(number):
        output[number], _ = pair[number].communicate()
        if pair[number].returncode != 0:
            pair[1 - number].kill()  # it would wait for the other

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
    is_done = ["done" in each for each in output]
    codes = [process.returncode for process in pair]
    assert all(is_done) and codes == [0, 0], "\n".join([*output, str(codes)])
