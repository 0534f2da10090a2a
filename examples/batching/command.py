"""A file of prompts: read, continued by an engine, written line by line."""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generating.ending import FAILED, answering_errors, fail
from served import processes
from served.asking import read_body
from served.display import Display, warm_up
from served.fields import check_texts
from served.loading import Served, load

from jkv.serving import Completion, EngineError, RequestRefused

from .lines import ResultLines

# Lines that are in the engine's hands, for each that runs.
AHEAD = 4

# Levels that are kept free, of what Python can nest: a result is written elsewhere.
MARGIN = 50


def serve(options: argparse.Namespace) -> None:
    """Do what the command line says; end with status 1 if a line has an error."""
    if processes.is_follower():
        with answering_errors():
            processes.follow(load(options).engine)
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
    """Load the model, and answer what has no result yet."""
    served = load(options)
    try:
        warm_up(served.engine)
        with Display(served.engine, len(lines)) as display:
            answer_all(served, lines, results, display, options.max_running)
        served.engine.close()
    except (OSError, EngineError) as error:
        fail(FAILED, f"{error}; run it again to go on from what is written")


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


def answer_all(
    served: Served,
    lines: list[str],
    results: ResultLines,
    display: Display,
    max_running: int,
) -> None:
    """Answer the lines that have no result yet, some ahead of those that run."""
    todo = (i for i in range(len(lines)) if i not in results.done)
    under_way: dict[int, int] = {}  # line by request
    while True:
        room = AHEAD * max_running - len(under_way)
        under_way |= dict(submit_some(served, lines, todo, room, results))
        if not under_way:
            return
        events = served.engine.step()
        for request_id in {event.request_id for event in events if event.reason}:
            found = served.engine.results(request_id, wait=False)
            if all(each.reason for each in found):
                number = under_way.pop(request_id)
                results.write(number, describe(lines[number], found))
        display.update(len(results.done))


def submit_some(
    served: Served,
    lines: list[str],
    todo: Iterator[int],
    room: int,
    results: ResultLines,
) -> Iterator[tuple[int, int]]:
    """Submit lines while there is room; yield each request's number and its line's.

    A line that cannot be answered has the reason as its result.
    """
    while room > 0 and (number := next(todo, None)) is not None:
        try:
            body = read_line(lines[number])
            # The same again, should it be computed a second time.
            asked = read_body(
                served, {"seed": number} | body, is_chat="messages" in body
            )
            if len(asked.prompts) > 1:
                raise ValueError("a line has one prompt")
            ask = dataclasses.replace(asked.ask, tokens=asked.prompts[0])
            yield served.engine.submit(ask), number
            room -= 1
        except (RequestRefused, ValueError, OverflowError) as error:
            results.write(number, name_of(lines[number]) | {"error": str(error)})


def read_line(line: str) -> dict[str, Any]:
    """Return the object that a line is.

    Raises:
        ValueError: when it is none, is nested too deeply, or its text is not Unicode.
    """
    body = parse(line)
    if not isinstance(body, dict):
        raise ValueError("the line must be an object")
    check_texts({name: value for name, value in body.items() if name != "id"})
    return body


def name_of(line: str) -> dict[str, Any]:
    """Return the id of a line, if it has one, as a part of its result."""
    try:
        body = parse(line)
    except ValueError:
        return {}
    return {"id": body["id"]} if isinstance(body, dict) and "id" in body else {}


def parse(line: str) -> Any:
    """Return the JSON of a line, if a result could hold it, too.

    Raises:
        ValueError: when it is not JSON, or nested too deeply.
    """
    try:
        body = json.loads(line)
        json.dumps(functools.reduce(lambda inner, _: [inner], range(MARGIN), body))
    except RecursionError:
        raise ValueError("the line is nested too deeply") from None
    return body


def describe(line: str, found: list[Completion]) -> dict[str, Any]:
    """Return what came of a line, ready for JSON.

    Raises:
        EngineError: when it failed: the next run tries again.
    """
    if any(each.reason.name == "FAILED" for each in found):
        raise EngineError(f"a step failed at {line[:60]}")
    choices = [
        {
            "index": each.sample,
            "text": each.text,
            "num_tokens": len(each.tokens),
            "logprob": round(sum(each.logprobs), 4),
            "finish_reason": each.reason.name.lower(),
        }
        for each in found
    ]
    return name_of(line) | {"choices": choices}
