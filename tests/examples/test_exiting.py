"""Scripts exit on Ctrl-C immediately with one line, even if other threads run."""

import importlib
import os
import signal
import subprocess
import sys

import pytest
from generating import exiting
from support.paths import EXAMPLES

from jkv import xla_flags

pytestmark = pytest.mark.one_end

# A program that takes about a second to compile.
COMPILING = """
with errors_in_one_line():
    import jax
    import jax.numpy as jnp

    def sort_often(x):
        for i in range(60):
            x = jnp.sort(x * (i + 1)) + jnp.sin(x)
        return x

    lowered = jax.jit(sort_often).lower(jnp.ones(8))
    print("compiling", flush=True)
    lowered.compile()
    print("compiled", flush=True)
"""


def test_ctrl_c_while_xla_compiles():
    """If Python destroys the client while XLA compiles, the process crashes."""
    script = "from generating.exiting import errors_in_one_line\n" + COMPILING
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if "CACHE_DIR" not in k}
        | {"PYTHONPATH": str(EXAMPLES), "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout.readline() == "compiling\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "\ninterrupted\n")


def test_ctrl_c_during_an_import_exits_at_once(tmp_path, monkeypatch, capsys):
    """A half-initialized C++ module crashes or raises an ImportError instead."""
    (tmp_path / "interrupted_module.py").write_text(
        "import signal\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt as error:\n"
        "    raise ImportError('half of it') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended, exiting.errors_in_one_line():
        importlib.import_module("interrupted_module")
    assert ended.value.code == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_ctrl_c_elsewhere_allows_cleanup(capsys):
    done = []
    with pytest.raises(SystemExit) as ended, exiting.errors_in_one_line():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            done.append("cursor shown")
    assert ended.value.code == 130 and done
    assert capsys.readouterr().err == "\ninterrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_background_job_continues(capsys):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with exiting.errors_in_one_line():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "error, status, message",
    [
        (ValueError("a number\n  of two lines"), 2, "error: a number of two lines\n"),
        (FileNotFoundError(2, "No such file", "x"), 1, "[Errno 2] No such file: 'x'"),
        (ModuleNotFoundError("no rich", name="rich.live"), 1, "'.[examples]'"),
        (ModuleNotFoundError("no uvicorn", name="uvicorn"), 1, "'.[http]'"),
    ],
)
def test_expected_errors_print_one_line(capsys, error, status, message):
    with (
        pytest.raises(SystemExit) as ended,
        exiting.errors_in_one_line(),
        exiting.answering_errors(),
    ):
        raise error
    output = capsys.readouterr().err
    assert ended.value.code == status and message in output and output.count("\n") == 1


def test_bugs_keep_their_traceback():
    with (
        pytest.raises(KeyError),
        exiting.errors_in_one_line(),
        exiting.answering_errors(),
    ):
        raise KeyError("a bug")


def test_flags_stored_by_the_doctor_are_set_before_importing_jax(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", "")
    xla_flags.keep_flags([xla_flags.NO_COMMAND_BUFFERS])
    script = """
import os, sys
from generating.exiting import errors_in_one_line
with errors_in_one_line():
    print(os.environ["XLA_FLAGS"], "jax" in sys.modules, "jkv" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == [xla_flags.NO_COMMAND_BUFFERS, "False", "False"]
