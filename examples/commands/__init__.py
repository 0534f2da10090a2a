"""Console commands of the installed examples (`pip install ./examples`).

Each command runs a script, which imports the packages beside it.
"""

import pathlib
import runpy
import sys

FOLDER = pathlib.Path(__file__).parents[1]


def generate() -> None:
    """Run `generate.py`, as `jkv-generate`."""
    _run("generate.py")


def chat() -> None:
    """Run `chat.py`, as `jkv-chat`."""
    _run("chat.py")


def serve() -> None:
    """Run `serve_http.py`, as `jkv-serve`."""
    _run("serve_http.py")


def batch() -> None:
    """Run `serve_batch.py`, as `jkv-batch`."""
    _run("serve_batch.py")


def _run(script: str) -> None:
    sys.path.insert(0, str(FOLDER))
    runpy.run_path(str(FOLDER / script), run_name="__main__")
