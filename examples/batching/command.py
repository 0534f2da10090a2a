"""The command of a batch: read prompts, run the engine, write results."""

import argparse
import sys
from pathlib import Path

from generating.exiting import FAILED, answering_errors, fail
from served import processes
from served.asking.languages import FIELDS as LANGUAGE_FIELDS
from served.asking.rules import FIELDS as RULE_FIELDS
from served.display import Display, warm_up
from served.loading import Served, load

from jkv.serving import EngineError

from .answering import answer_all
from .forms import read_form
from .lines import ResultLines

MOST_GRAMMARS = 8  # at a time, if a line has one


def serve(options: argparse.Namespace) -> None:
    """Run the command; exit with status 1 if a line has an error."""
    if processes.is_follower():
        with answering_errors():
            # Lines determine the compiled programs, which all processes need.
            lines = read_lines(Path(options.prompts))
            processes.follow(load_for(options, lines).engine)
        return
    with answering_errors():
        lines = read_lines(Path(options.prompts))
        with ResultLines(Path(options.results), lines) as results:
            # Other processes wait for this one, so run even without new lines.
            if len(results.done) < len(lines) or options.coordinator:
                run(options, lines, results)
    answered = len(results.done) - len(results.failed)
    summary = f"{answered} of {len(lines)} lines are answered in {options.results}"
    if results.failed:
        fail(FAILED, f"{summary}, {len(results.failed)} have an error there")
    print(summary, file=sys.stderr)


def run(options: argparse.Namespace, lines: list[str], results: ResultLines) -> None:
    """Load the model and compute the missing results."""
    served = load_for(options, lines)
    try:
        warm_up(served.engine)
        with Display(served.engine, len(lines)) as display:
            answer_all(served, lines, results, display, options.max_running)
        served.engine.close()
    except (OSError, EngineError) as error:
        fail(FAILED, f"{error}; run it again to go on from what is written")
    finally:
        served.end()


def load_for(options: argparse.Namespace, lines: list[str]) -> Served:
    """Load the model; enable grammars and rules if a line has any."""
    parsed = {name for line in lines for name in _list_names(line)}
    return load(
        options,
        max_grammars=MOST_GRAMMARS if parsed & LANGUAGE_FIELDS else 0,
        max_rules=options.max_running if parsed & RULE_FIELDS.keys() else 0,
    )


def read_lines(path: Path) -> list[str]:
    """Return the nonblank lines of a file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it has no nonblank line, or is not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    lines = [line.rstrip("\r") for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty")
    return lines


def _list_names(line: str) -> list[str]:
    """Return the names of a line's fields; empty for an invalid line."""
    try:
        fields = read_form(line).fields
        return [name for name, value in fields.items() if value is not None]
    except ValueError:
        return []
