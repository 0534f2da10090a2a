"""A process of an engine's two is killed or stopped in the middle of a window.

The other one names it, or is ended by JAX with a message. Neither hangs.
"""

import os
import pathlib
import signal
import threading
import time

import pytest
from support.processes import SECONDS, find_port, start

SCRIPT = pathlib.Path(__file__).with_name("faulty_processes.py")
LEADER, FOLLOWER = 0, 1
# The heartbeat's ten, the time that JAX needs to report, and a busy machine.
SECONDS_TO_END = 30
SAID = (
    "EngineError: the first process of the mesh stopped responding",
    "EngineError: request",  # which failed, and why
    "EngineError: the engine has failed",
    "Terminating process because",  # JAX's
)


@pytest.mark.further
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("who", [FOLLOWER, LEADER])
def test_the_other_process_ends_with_the_reason(who, number):
    port = find_port()
    pair = [start(SCRIPT, process, port) for process in (LEADER, FOLLOWER)]
    watch = threading.Timer(SECONDS, lambda: [each.kill() for each in pair])
    watch.start()
    try:
        for line in pair[LEADER].stdout:
            if "under way" in line:
                break
        os.kill(pair[who].pid, number)
        began, other = time.monotonic(), pair[1 - who]
        output, _ = other.communicate(timeout=SECONDS_TO_END)
        print(f"{time.monotonic() - began:.1f} s, status {other.returncode}")
        assert other.returncode not in (0, -signal.SIGKILL)
        assert any(said in output for said in SAID), output
    finally:
        watch.cancel()
        for process in pair:
            process.kill()
            process.communicate()
