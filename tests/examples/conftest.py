"""What tests of examples share."""

import functools
import io
import os
import runpy
import sys

import pytest
from support.paths import EXAMPLES


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Run scripts in this process, and return what they wrote, `out` and `err`."""

    def run(script, *arguments, stdin=""):
        given = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", given)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr()

    return run


@pytest.fixture
def one_size(monkeypatch):
    """Let steps of `generate.py` have one size: a third of the compiling."""
    from generating import command

    engine = functools.partial(command.Engine, row_counts=(16,))
    monkeypatch.setattr(command, "Engine", engine)


@pytest.fixture(autouse=True)
def ending_this_test_alone(monkeypatch):
    """Let `os._exit`, by which scripts end after Ctrl-C, not end all tests."""
    monkeypatch.setattr(os, "_exit", sys.exit)
