"""A file of prompts: read, continued by an engine, written line by line."""

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

MOST_GRAMMARS = 8  # at one time, if a line asks for one; others wait


def serve(options: argparse.Namespace) -> None:
    """Run the command line; end with status 1 if a line has an error."""
    if processes.is_follower():
        with answering_errors():
            # The options of the lines determine the compiled programs, here as well.
            lines = read_lines(Path(options.prompts))
            processes.follow(load_for(options, lines).engine)
        return
    with answering_errors():
        lines = read_lines(Path(options.prompts))
        with ResultLines(Path(options.results), lines) as results:
            # The other processes wait for this one, be there something to do or not.
            if len(results.done) < len(lines) or options.coordinator:
                run(options, lines, results)
    answered = len(results.done) - len(results.failed)
    said = f"{answered} of {len(lines)} lines are answered in {options.results}"
    if results.failed:
        fail(FAILED, f"{said}, {len(results.failed)} have an error there")
    print(said, file=sys.stderr)


def run(options: argparse.Namespace, lines: list[str], results: ResultLines) -> None:
    """Load the model, and answer the lines without a result."""
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
    """Load the model, with room for grammars and rules if a line asks for any."""
    parsed = {name for line in lines for name in _list_names(line)}
    return load(
        options,
        max_grammars=MOST_GRAMMARS if parsed & LANGUAGE_FIELDS else 0,
        max_rules=options.max_running if parsed & RULE_FIELDS.keys() else 0,
    )


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file that are not blank.

    Raises:
        OSError: when it cannot be read.
        ValueError: when it has none, or is not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    lines = [line.rstrip("\r") for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no line")
    return lines


def _list_names(line: str) -> list[str]:
    """Return the names of a line's fields."""
    try:
        fields = read_form(line).fields
        return [name for name, value in fields.items() if value is not None]
    except ValueError:
        return []
