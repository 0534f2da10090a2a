"""Requests and windows together: what a turn of the engine does.

A turn (`step`) tells the generation who comes and goes, starts its next window, and
reads the last one. Every end of a sequence, whatever its cause, goes through `_end`.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from jkv.decoding.texts.results import FinishReason
from jkv.inspection.invariants import check
from jkv.serving.book import Book, Part
from jkv.serving.deadlines import Deadlines
from jkv.serving.loop import Loop
from jkv.serving.measures import EngineStats, Measures
from jkv.serving.news import News, wake
from jkv.serving.programs import EngineSizes
from jkv.serving.record import (
    EngineError,
    Event,
    QueueFull,
    Record,
    RequestState,
    Sample,
)
from jkv.serving.store import Store
from jkv.serving.submission import Request
from jkv.serving.texts import Detokenize, TextStream
from jkv.serving.window_report import SequenceReport, WindowReport

logger = logging.getLogger("jkv.serving")


class HostOptions(NamedTuple):
    """What the host does with requests."""

    detokenize: Detokenize | None
    max_waiting: int | None
    max_results: int
    result_seconds: float
    checks: bool  # look at the cache's invariants after each window
    clock: Callable[[], float]


class _Window(NamedTuple):
    """Steps that were started and not read yet."""

    parts: list[Part | None]  # who had each prompt
    report: WindowReport


class Core:
    """The host's side of an engine; one thread at a time does its steps.

    Attributes:
      loop: the device's side.
      book: requests that have not ended.
      measures: what was done.
    """

    def __init__(
        self,
        loop: Loop,
        sizes: EngineSizes,
        options: HostOptions,
        lock: AbstractContextManager[Any],
    ):
        self.loop, self.measures = loop, Measures()
        self.book = Book(sizes.num_prompts, sizes.num_samples)
        self.measures.free_blocks = sum(loop.num_blocks)
        self._sizes, self._options, self._lock = sizes, options, lock
        self._deadlines = Deadlines()
        self._ended: Store[Record] = Store(
            max_entries=options.max_results,
            seconds=options.result_seconds,
            clock=options.clock,
        )
        self._unread: _Window | None = None
        self._news = News()
        self._next_id = 0
        self._failure: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether a step would do nothing."""
        if self._unread is not None or self._news:
            return False
        return not (self.book.records or self.book.has_changes)

    @property
    def has_room(self) -> bool:
        """Whether one more request may wait."""
        most = self._options.max_waiting
        return most is None or self.book.num_waiting < most

    def add(self, request: Request) -> Record:
        """Let a request wait.

        Raises:
          QueueFull: if too many do.
          EngineError: if the engine cannot go on.
        """
        with self._lock:
            if self._failure is not None:
                raise EngineError("the engine has failed") from self._failure
            if not self.has_room:
                raise QueueFull(f"{self.book.num_waiting} requests wait already")
            detokenize, now = self._options.detokenize, self._options.clock()
            samples = [Sample(None) for _ in range(request.n)]
            if detokenize is not None:
                prompt, stops = request.tokens.tolist(), request.stop_strings
                for sample in samples:
                    sample.stream = TextStream(detokenize, prompt, stops)
            record = Record(self._next_id, request, samples, now)
            self._next_id += 1
            self.book.add(record)
            self._news.follow(record)
            if request.timeout is not None:
                self._deadlines.add(record.request_id, now + request.timeout)
            return record

    def find(self, request_id: int) -> Record:
        """Return a request that goes on, or one that ended not long ago.

        Raises:
          KeyError: for any other.
        """
        with self._lock:
            record = self.book.records.get(request_id) or self._ended.find(request_id)
        if record is None:
            raise KeyError(
                f"request {request_id} was never submitted, or it ended so long ago "
                f"that its results are forgotten (max_results, result_seconds)"
            )
        return record

    def cancel(self, record: Record) -> bool:
        """End what goes on of a request; return whether there was anything."""
        with self._lock:
            goes_on = not record.has_ended
            self._cancel(record)
            wake(record, self._cancel)
        return goes_on

    def cancel_all(self) -> None:
        """End everything that goes on."""
        for record in list(self.book.records.values()):
            self.cancel(record)

    def count_refused(self) -> None:
        """Note a request that was not taken in."""
        with self._lock:
            self.measures.refused += 1

    def read_stats(self) -> EngineStats:
        """Return a snapshot."""
        with self._lock:
            states = self.book.count_states()
            return self.measures.read(
                sum(each.num_blocks for each in self.loop.cache.metadata.groups),
                self._options.clock(),
                waiting=states[RequestState.WAITING],
                running=states[RequestState.RUNNING],
                preempted=states[RequestState.PREEMPTED],
            )

    # A turn.

    def step(self) -> list[Event]:
        """Start the next window, read the last one, and return what is new."""
        try:
            window = self._start_window()
            unread, self._unread = self._unread, window
            if unread is not None:
                self._read_window(unread)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        with self._lock:
            return self._news.tell(self._cancel)

    def _start_window(self) -> _Window | None:
        with self._lock:
            self._end_overdue()
            changes = []
            while self.book.has_changes:
                seated = self.book.seat(self._sizes.num_lanes)
                changes.append((seated, self.book.take_cancelled()))
            parts = self.book.seated_parts()
            has_work = self.book.num_seated > 0
        for seated, cancelled in changes:
            self.loop.exchange(seated, cancelled)
        report = self.loop.run(self._sizes.num_steps) if has_work else None
        if self._options.checks and (changes or report):
            for cache in self.loop.caches:
                check(cache)
        return None if report is None else _Window(parts, report)

    def _read_window(self, window: _Window) -> None:
        report = jax.device_get(window.report)
        brought, num_tokens = report.by_sequence(), 0
        with self._lock:
            now = self._options.clock()
            live = self.book.live_samples(window.parts, brought)
            for sequence, part, index in live:
                news, sample = brought[sequence], part.record.samples[index]
                sample.stage = news.stage
                if not news.tokens and news.reason == FinishReason.RUNNING:
                    continue
                before = len(sample.tokens)
                self._take(part.record, index, news)
                count = len(news.tokens)
                self.measures.add_times(part.record, sample, count, now)
                num_tokens += len(sample.tokens) - before
            self.measures.add_window(report.statistics, num_tokens, now)
            self.measures.free_blocks = int(report.num_free_blocks)

    def _take(self, record: Record, index: int, news: SequenceReport) -> None:
        """Take what a window brought for a sequence."""
        self._news.note(record)
        try:
            ended = record.samples[index].extend(
                news.tokens, news.logprobs, news.reason
            )
        except Exception as error:  # of the user's detokenizer
            record.error = error
            self._end_all(record, FinishReason.FAILED)
            return
        if ended != FinishReason.RUNNING:
            goes_on = news.reason == FinishReason.RUNNING
            self._end(record, index, ended, is_computed=goes_on)

    # How a request ends.

    def _end_overdue(self) -> None:
        for request_id in self._deadlines.pop_due(self._options.clock()):
            record = self.book.records.get(request_id)
            if record is not None:
                self._end_all(record, FinishReason.DEADLINE)
        self._deadlines.forget_ended(self.book.records.__contains__)

    def _cancel(self, record: Record) -> None:
        self._end_all(record, FinishReason.CANCELLED)

    def _end_all(self, record: Record, reason: FinishReason) -> None:
        for index, sample in enumerate(record.samples):
            if not sample.has_ended:
                self._end(record, index, reason, is_computed=True)

    def _end(
        self, record: Record, index: int, reason: FinishReason, *, is_computed: bool
    ) -> None:
        """End a sequence: the one place where its blocks are given back."""
        self._news.note(record)
        if not self.book.end(record, index, reason, is_computed=is_computed):
            return
        self._ended.put(record.request_id, record)
        name = record.state.value  # finished, cancelled or failed
        setattr(self.measures, name, getattr(self.measures, name) + 1)

    def _fail(self, error: BaseException) -> None:
        """Fail the requests in the generation, and begin with an empty one."""
        with self._lock:
            self._unread = None
            parts = self.book.seated_parts()
            seated = {part.record.request_id: part.record for part in parts if part}
            if isinstance(error, Exception):  # not an interrupt
                count = len(seated)
                logger.error("a step failed with %d requests", count, exc_info=error)
            self._fail_all(list(seated.values()), error)
            self.book.take_cancelled()
            try:
                self.loop.start_again()
            except Exception as failure:
                logger.error("the engine cannot go on: %s", failure)
                failure.__cause__ = error
                self._failure = failure
                self._fail_all(list(self.book.records.values()), failure)
            self.measures.free_blocks = sum(self.loop.num_blocks)

    def _fail_all(self, records: list[Record], error: BaseException) -> None:
        for record in records:
            record.error = error
            self._end_all(record, FinishReason.FAILED)
