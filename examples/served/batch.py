"""A file of prompts: read, continued by an engine, written line by line."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jkv.serving import Completion, EngineError, RequestRefused

from .asking import read_body
from .display import Display, warm_up
from .lines import ResultLines
from .loading import Served, load

# Lines that are in the engine's hands, for each that runs.
AHEAD = 4


def serve(options: argparse.Namespace) -> None:
    """Do what the command line says."""
    try:
        lines = read_lines(Path(options.prompts))
        with ResultLines(Path(options.results), lines) as results:
            if len(results.done) < len(lines):
                served = load(options)
                warm_up(served.engine)
                with Display(served.engine, len(lines)) as display:
                    answer_all(served, lines, results, display, options.max_running)
            print(
                f"{len(results.done)} of {len(lines)} results are in {options.results}",
                file=sys.stderr,
            )
    except (OSError, EngineError) as error:
        sys.exit(f"error: {error}; run it again to go on from what is written")
    except ValueError as error:
        sys.exit(f"error: {error}")


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
            body = json.loads(lines[number])
            if isinstance(body, dict):
                # The same again, should it be computed a second time.
                body = {"seed": number} | body
            is_chat = isinstance(body, dict) and "messages" in body
            asked = read_body(served, body, is_chat=is_chat)
            if len(asked.prompts) > 1:
                raise ValueError("a line has one prompt")
            yield served.engine.submit(asked.prompts[0], **asked.options), number
            room -= 1
        except (RequestRefused, ValueError) as error:
            results.write(number, {"error": str(error)})


def describe(line: str, found: list[Completion]) -> dict[str, Any]:
    """Return what came of a line, ready for JSON.

    Raises:
        EngineError: when it failed: the next run tries again.
    """
    if any(each.reason.name == "FAILED" for each in found):
        raise EngineError(f"a step failed at {line[:60]}")
    named = {"id": body["id"]} if "id" in (body := json.loads(line)) else {}
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
    return named | {"choices": choices}
