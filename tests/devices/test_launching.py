"""`multiprocess.py`: its options, the exit of its children, and its address.

In this folder, as `tools/` has a module of the same name: this is another process.
"""

import argparse
import os
import runpy
import signal
import subprocess
import sys

import jax
import pytest
from processes import joining, launching, options
from support.paths import EXAMPLES

pytestmark = pytest.mark.one_end

# The launcher, and its child: the same script with --coordinator.
SCRIPT = """
import argparse, sys, time

if "--coordinator" in sys.argv:
    print("waiting", flush=True)
    time.sleep(600)
from processes.launching import launch

sizes = dict(num_processes=2, restarts=1, heartbeat=5)
sys.exit(launch(argparse.Namespace(state=sys.argv[1], **sizes)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_stops_its_children(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES)},
    )
    assert launcher.stdout.readline() == "waiting\n"
    launcher.send_signal(number)
    _, output = launcher.communicate(timeout=30)
    *started, last = output.splitlines()
    assert launcher.returncode == 128 + number
    assert last == f"launcher: ended by {signal.Signals(number).name}"
    pids = [int(line.rpartition(" ")[2]) for line in started]
    assert len(pids) == 2  # it was not restarted
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("process", [0, 1])
def test_the_coordinator_is_bound_to_the_given_address(monkeypatch, process):
    """JAX would bind it to all interfaces."""
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **all: given.update(all))
    sizes = dict(devices=0, num_processes=2, heartbeat=5, process=process)
    joining.join(argparse.Namespace(coordinator="10.0.0.7:1234", **sizes))
    assert given["coordinator_address"] == "10.0.0.7:1234"
    bound = given.get("coordinator_bind_address")
    assert bound == ("10.0.0.7:1234" if process == 0 else None)


def test_auto_coordinator_passes_no_process_arguments(monkeypatch):
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **all: given.update(all))
    sizes = dict(devices=0, num_processes=2, heartbeat=5, process=None)
    joining.join(argparse.Namespace(coordinator="auto", **sizes))
    assert not any(name.startswith("coordinator") for name in given)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--num-processes 0", "--num-processes must be at least 1"),
        ("--heartbeat 0", "--heartbeat must be at least 1"),
        ("--model nowhere", "--model nowhere has no config.json"),
        ("--process 0", "goes with --coordinator HOST:PORT"),
        ("--coordinator a:1", "--process N goes with --coordinator"),
        ("--coordinator here", "must be host:port or auto, got here"),
        ("--coordinator a:99999 --process 0", "must be host:port or auto"),
        ("--coordinator a:1 --process 2", "must be below --num-processes 2"),
        ("--tensor-parallel 3", "must divide the 4 devices"),
    ],
)
def test_bad_values_are_reported_in_one_line(monkeypatch, capsys, arguments, message):
    given = ["multiprocess.py", "--state", "x", *arguments.split()]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as ended:
        options.parse_arguments("a test")
    output = capsys.readouterr().err
    assert ended.value.code == 2 and message in output and output.count("\n") == 1


@pytest.mark.parametrize("coordinator", ["localhost:0", "10.0.0.7:80", "[::1]:8476"])
def test_valid_addresses(coordinator):
    assert options.address(coordinator) == coordinator


@pytest.mark.parametrize(
    "arguments, status, message",
    [(["--help"], 0, "usage: multiprocess.py"), (["--state", __file__], 1, "error: ")],
)
def test_help_and_a_file_instead_of_a_folder(
    monkeypatch, capsys, arguments, status, message
):
    monkeypatch.setattr(launching, "start", lambda *_: pytest.fail("too early"))
    monkeypatch.setattr(sys, "argv", ["multiprocess.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "multiprocess.py"), run_name="__main__")
    output = capsys.readouterr()
    assert ended.value.code == status and (output.out + output.err).startswith(message)
