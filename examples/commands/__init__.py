"""The commands of an installation (`pip install ./examples`), each one of the scripts.

The scripts import the packages beside them, as `python examples/generate.py` does.
"""

import pathlib
import runpy
import sys

FOLDER = pathlib.Path(__file__).parents[1]


def generate() -> None:
    """Continue prompts: `jkv-generate`."""
    _run("generate.py")


def chat() -> None:
    """Chat in the terminal: `jkv-chat`."""
    _run("chat.py")


def serve() -> None:
    """Serve OpenAI's API: `jkv-serve`."""
    _run("serve_http.py")


def batch() -> None:
    """Continue a file of prompts: `jkv-batch`."""
    _run("serve_batch.py")


def _run(script: str) -> None:
    sys.path.insert(0, str(FOLDER))
    runpy.run_path(str(FOLDER / script), run_name="__main__")
