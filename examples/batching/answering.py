"""Lines become requests, and what came of them results.

A line is understood by the same code as a client's body. What steers it is prepared in
another thread, while the engine goes on with others.
"""

import dataclasses
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from served.asking.body import Asked
from served.asking.showing import Shown, read_fields
from served.display import Display
from served.loading import Served
from served.mistakes import Refused
from served.replying.replies import select_likely
from served.steering.variants import Held

from jkv.serving import Completion, EngineError

from .lines import ResultLines, name_of, read_line

# Lines that are in the engine's hands, for each that runs.
AHEAD = 4

MOST_SECONDS = 24 * 3600.0  # in which there is room for a line's grammar and rules


class Line(NamedTuple):
    """A line that can be answered."""

    number: int
    asked: Asked
    shown: Shown


def answer_all(
    served: Served,
    lines: list[str],
    results: ResultLines,
    display: Display,
    max_running: int,
) -> None:
    """Answer the lines that have no result yet, some ahead of those that run."""
    batch = Batch(served, lines, results)
    while True:
        batch.begin_lines(AHEAD * max_running)
        if batch.has_begun:
            batch.step()
        elif not batch.wait():
            return
        display.update(len(results.done))


class Batch:
    """Lines under way."""

    def __init__(self, served: Served, lines: list[str], results: ResultLines) -> None:
        self._served, self._lines, self._results = served, lines, results
        self._todo = (i for i in range(len(lines)) if i not in results.done)
        self._threads = ThreadPoolExecutor(AHEAD)
        self._waiting: dict[Future[Held], Line] = {}  # for what steers them
        self._running: dict[int, tuple[Line, Held]] = {}  # by request

    @property
    def has_begun(self) -> bool:
        """Whether the engine has a line."""
        return bool(self._running)

    def begin_lines(self, most: int) -> None:
        """Begin so many lines at one time; one that cannot be has the reason."""
        for future in [each for each in self._waiting if each.done()]:
            self._submit(self._waiting.pop(future), future)
        while len(self._running) + len(self._waiting) < most:
            number = next(self._todo, None)
            if number is None:
                return
            if (line := self._read(number)) is None:
                continue
            asked = line.asked
            if asked.language is None and asked.rules is None:
                self._submit(line, None)
                continue
            held = self._threads.submit(
                self._served.hold, asked.language, asked.rules, MOST_SECONDS
            )
            self._waiting[held] = line

    def step(self) -> None:
        """Let the engine go on; write what has ended."""
        events = self._served.engine.step()
        for request_id in {event.request_id for event in events if event.reason}:
            found = self._served.engine.results(request_id, wait=False)
            if all(each.reason for each in found):
                line, held = self._running.pop(request_id)
                held.release()
                self._write(line, found)

    def wait(self) -> bool:
        """Wait for what steers the next line; return whether there is one."""
        wait(self._waiting, return_when=FIRST_COMPLETED)
        return bool(self._waiting)

    def _read(self, number: int) -> Line | None:
        """Return a line, understood as a client's body is."""
        try:
            body = read_line(self._lines[number])
            # The same again, should it be computed a second time.
            fields = {"seed": number} | {k: v for k, v in body.items() if k != "id"}
            asked, shown = read_fields(
                self._served, fields, is_chat="messages" in fields
            )
            _check(asked, shown)
        except Exception as error:  # whatever is wrong with it, others are answered
            self._fail(number, error)
            return None
        return Line(number, asked, shown)

    def _submit(self, line: Line, steered: Future[Held] | None) -> None:
        try:
            held = Held() if steered is None else steered.result()
        except Refused as error:
            return self._fail(line.number, error)
        ask = dataclasses.replace(
            line.asked.ask, tokens=line.asked.prompts[0], variant=held.variant
        )
        try:
            request = self._served.engine.submit(ask)
        except (ValueError, OverflowError) as error:
            held.release()
            return self._fail(line.number, error)
        self._running[request] = line, held
        return None

    def _fail(self, number: int, error: Exception) -> None:
        result = name_of(self._lines[number]) | {"error": str(error) or repr(error)}
        self._results.write(number, result)

    def _write(self, line: Line, found: list[Completion]) -> None:
        text = self._lines[line.number]
        chosen = select_likely(found, line.shown.num_choices)
        self._results.write(line.number, describe(text, chosen))


def _check(asked: Asked, shown: Shown) -> None:
    """Refuse what a result does not tell."""
    if len(asked.prompts) > 1:
        raise Refused("a line has one prompt", "prompt")
    for name, is_asked in (
        ("stream", shown.is_streamed),
        ("echo", shown.echoes is not None),
        ("logprobs", shown.num_top is not None),
    ):
        if is_asked:
            raise Refused(f"{name} is not served of a batch; leave it out", name)


def describe(line: str, found: list[Completion]) -> dict[str, Any]:
    """Return what came of a line, ready for JSON.

    Raises:
        EngineError: when it failed: the next run tries again.
    """
    if any(each.reason.name == "FAILED" for each in found):
        raise EngineError(f"a step failed at {line[:60]}")
    choices = [
        {
            "index": index,
            "text": each.text,
            "num_tokens": len(each.tokens),
            "logprob": round(sum(each.logprobs), 4),
            "finish_reason": each.reason.name.lower(),
        }
        for index, each in enumerate(found)
    ]
    return name_of(line) | {"choices": choices}
