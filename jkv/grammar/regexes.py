"""Regular expressions as automata; the process that compiles them is bounded."""

import functools
import importlib.util
import json
import pathlib
import subprocess
import sys

import numpy as np

from jkv.grammar.automaton import Automaton, minimize
from jkv.grammar.errors import TooLarge, Unsupported

_PROGRAM = pathlib.Path(__file__).parent / "regex_process.py"


@functools.lru_cache(maxsize=256)
def compile_regex(pattern: str, max_bytes: int) -> Automaton:
    """Return the texts that a pattern matches from their beginning to their end.

    Args:
      pattern: in the syntax of https://docs.rs/regex, over Unicode characters.
      max_bytes: memory that compiling may take.

    Raises:
      ImportError: the extra is not installed.
      TooLarge: it takes more than `max_bytes`.
      Unsupported: the compiler does not take the pattern.
    """
    if importlib.util.find_spec("outlines_core") is None:
        raise ImportError(
            "patterns need outlines_core: pip install 'jkv[grammar]'"
        )  # pragma: no cover (the extra is not installed)
    ran = subprocess.run(
        [sys.executable, "-P", str(_PROGRAM)],
        input=json.dumps({"pattern": pattern, "max_bytes": max_bytes}).encode(),
        capture_output=True,
        check=False,
    )
    said = ran.stderr.decode(errors="replace").strip()
    if ran.returncode:
        if "memory" in said.lower():
            raise TooLarge(
                f"compiling the pattern {_shorten(pattern)} takes more than max_bytes, "
                f"{max_bytes:,}"
            )
        raise RuntimeError(f"the compiler of patterns ended: {said}")
    head, body = ran.stdout.split(b"\n", 1)
    answer = json.loads(head)
    if "error" in answer:
        raise Unsupported(f"the pattern {_shorten(pattern)}: {answer['error']}")
    table = np.frombuffer(body, np.int32).reshape(-1, 256)
    if not len(table):
        return Automaton(np.full((1, 256), -1, np.int32), np.zeros(1, bool))
    accepting = np.zeros(len(table), bool)
    accepting[answer["finals"]] = True
    return minimize(Automaton(table, accepting))


def _shorten(pattern: str) -> str:
    return repr(pattern if len(pattern) < 60 else pattern[:57] + "...")
