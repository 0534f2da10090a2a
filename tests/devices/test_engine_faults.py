"""One of an engine's two processes is killed or stopped within a window.

The other one names it, or JAX ends it with a message. Neither hangs.
"""

import os
import pathlib
import signal
import threading
import time

import pytest
from support.serving.processes import SECONDS, find_port, start

SCRIPT = pathlib.Path(__file__).with_name("faulty_processes.py")
LEADER, FOLLOWER = 0, 1
# Ten heartbeats, JAX's delay, and a busy machine.
SECONDS_TO_END = 30
MESSAGES = (
    "EngineError: the first process of the mesh stopped responding",
    "EngineError: request",  # names the failed request and the cause
    "EngineError: the engine has failed",
    "Terminating process because",  # JAX's
)


@pytest.mark.further
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [FOLLOWER, LEADER])
def test_the_other_process_ends_with_the_reason(victim, number):
    port = find_port()
    pair = [start(SCRIPT, process, port) for process in (LEADER, FOLLOWER)]
    watch = threading.Timer(SECONDS, lambda: [each.kill() for each in pair])
    watch.start()
    try:
        for line in pair[LEADER].stdout:
            if "under way" in line:
                break
        os.kill(pair[victim].pid, number)
        began, other = time.monotonic(), pair[1 - victim]
        output, _ = other.communicate(timeout=SECONDS_TO_END)
        print(f"{time.monotonic() - began:.1f} s, status {other.returncode}")
        assert other.returncode not in (0, -signal.SIGKILL)
        assert any(message in output for message in MESSAGES), output
    finally:
        watch.cancel()
        for process in pair:
            process.kill()
            process.communicate()
