"""Run the lines of a batch through the engine and write their results.

Lines are parsed like request bodies of the server. Logits processors are prepared in
other threads while the engine runs.
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from served.asking.body import ParsedBody
from served.asking.showing import Shown, read_fields
from served.display import Display
from served.loading import Served
from served.mistakes import Refused
from served.processors.variants import Held
from served.replying.kinds import AnyReply
from served.replying.replies import check_reason, select_likely
from served.replying.scoring import Scored

from jkv import FinishReason
from jkv.serving import Completion, EngineError

from .forms import Form, read_form, write_answer, write_error
from .lines import ResultLines

# Submitted lines per running sequence.
AHEAD = 4

MOST_SECONDS = 24 * 3600.0  # to wait for a line's grammar and rules


class Line(NamedTuple):
    """A parsed line."""

    number: int
    form: Form
    parsed: ParsedBody
    shown: Shown


def answer_all(
    served: Served,
    lines: list[str],
    results: ResultLines,
    display: Display,
    max_running: int,
) -> None:
    """Compute the missing results; lines are submitted ahead of the running ones."""
    batch = Batch(served, lines, results)
    while True:
        batch.begin_lines(AHEAD * max_running)
        if batch.has_begun:
            batch.step()
        elif not batch.wait():
            return
        display.update(len(results.done))


class Batch:
    """Lines that are waiting or running."""

    def __init__(self, served: Served, lines: list[str], results: ResultLines) -> None:
        self._served, self._lines, self._results = served, lines, results
        self._todo = (i for i in range(len(lines)) if i not in results.done)
        self._threads = ThreadPoolExecutor(AHEAD)
        self._waiting: dict[Future[Held], Line] = {}  # for logits processors
        self._running: dict[int, tuple[Line, Held]] = {}  # by request

    @property
    def has_begun(self) -> bool:
        """True if the engine has lines."""
        return bool(self._running)

    def begin_lines(self, most: int) -> None:
        """Submit lines until `most` are in progress; write errors of invalid lines."""
        for future in [each for each in self._waiting if each.done()]:
            self._submit(self._waiting.pop(future), future)
        while len(self._running) + len(self._waiting) < most:
            number = next(self._todo, None)
            if number is None:
                return
            if (line := self._read(number)) is None:
                continue
            parsed = line.parsed
            if parsed.language is None and parsed.rules is None:
                self._submit(line, None)
                continue
            held = self._threads.submit(
                self._served.hold, parsed.language, parsed.rules, MOST_SECONDS
            )
            self._waiting[held] = line

    def step(self) -> None:
        """Run a step of the engine; write finished results."""
        events = self._served.engine.step()
        for request_id in {event.request_id for event in events if event.reason}:
            found = self._served.engine.results(request_id, wait=False)
            if all(each.reason for each in found):
                line, held = self._running.pop(request_id)
                held.release()
                self._write(line, found)

    def wait(self) -> bool:
        """Wait for a line's logits processor; return False if no line waits for one."""
        wait(self._waiting, return_when=FIRST_COMPLETED)
        return bool(self._waiting)

    def _read(self, number: int) -> Line | None:
        """Parse a line; write its error and return None if it is invalid."""
        try:
            form = read_form(self._lines[number])
            fields = dict(form.fields)
            if fields.get("seed") is None:  # for reproducible results
                fields["seed"] = number
            is_chat = form.kind.is_chat
            parsed, shown = read_fields(self._served, fields, is_chat=is_chat)
            parsed = form.kind.bound(self._served, form.body, parsed)
            _check(parsed, shown)
        except Exception as error:  # an error must not stop the batch
            self._fail(number, error)
            return None
        return Line(number, form, parsed, shown)

    def _submit(self, line: Line, processor: Future[Held] | None) -> None:
        try:
            held = Held() if processor is None else processor.result()
        except Refused as error:
            return self._fail(line.number, error)
        if line.parsed.request.max_new_tokens == 0:  # echo without generation
            held.release()
            return self._write(line, [_nothing()] * line.parsed.request.n)
        request = dataclasses.replace(
            line.parsed.request, tokens=line.parsed.prompts[0], variant=held.variant
        )
        try:
            number = self._served.engine.submit(request)
        except (ValueError, OverflowError) as error:
            held.release()
            return self._fail(line.number, error)
        self._running[number] = line, held
        return None

    def _fail(self, number: int, error: Exception) -> None:
        self._results.write(number, write_error(self._lines[number], error))

    def _write(self, line: Line, found: list[Completion]) -> None:
        text = self._lines[line.number]
        if any(each.reason == FinishReason.FAILED for each in found):
            raise EngineError(f"a step failed: {text[:60]}: the next run tries again")
        chosen = select_likely(found, line.shown.num_choices)
        num_new = sum(len(each.tokens) for each in found)
        try:
            for each in found:
                check_reason(each.reason)
            whole = self._reply(line).whole(chosen, num_new)
            result = write_answer(text, line.form, chosen, whole)
        except Refused as error:
            return self._fail(line.number, error)
        self._results.write(line.number, result)
        return None

    def _reply(self, line: Line) -> AnyReply:
        """Return the reply writer of a line."""
        scored: Sequence[Scored] = ()
        if line.shown.has_prompt_logprobs and self._served.scorer is not None:
            scored = self._served.scorer.score(line.parsed.prompts)
        kind, body = line.form.kind, line.form.body
        return kind.reply(self._served, body, line.parsed, line.shown, scored)


def _check(parsed: ParsedBody, shown: Shown) -> None:
    """Refuse options that batches do not support."""
    if len(parsed.prompts) > 1:
        raise Refused("a line must have one prompt", "prompt")
    if shown.is_streamed:
        raise Refused("stream is not supported in a batch; omit it", "stream")


def _nothing() -> Completion:
    """Return a completion without new tokens."""
    return Completion(-1, 0, [], [], FinishReason.LENGTH, "")
