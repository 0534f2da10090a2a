"""Scheduler: admits requests, starts and reads windows of steps, finishes requests.

A step of the engine (`step`) sends new and cancelled requests to the device, starts the
next window, and reads the report of the previous one. Every sequence finishes through
`_end`.

Weights may change while sequences run. Each token records the version that produced it,
and the oldest possible version of the keys and values in its context. Keeping the cache
of running sequences is the in-flight update of PipelineRL
(https://arxiv.org/abs/2509.19128); AReaL (https://arxiv.org/abs/2505.24298) recomputes
it. Both need the ages of a sequence's parts.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jkv.decoding import FinishReason
from jkv.inspection import check
from jkv.serving.device.loop import Loop, Progress
from jkv.serving.device.processes import SharedLoop
from jkv.serving.device.programs import (
    Arrivals,
    Change,
    EngineSizes,
    WindowReport,
)
from jkv.serving.request.request import (
    CheckedRequest,
    Client,
    EngineError,
    Extension,
    RequestState,
    RequestStatus,
    SaltNumbers,
    Sample,
    SequenceNews,
)
from jkv.serving.request.results import Event, News, Results, wake
from jkv.serving.request.texts import Detokenize, TextStream
from jkv.serving.scheduler.measures import EngineStats, Measures, QueueWait
from jkv.serving.scheduler.parking import Parked, Parking
from jkv.serving.scheduler.queue import Queue
from jkv.serving.scheduler.retention import Keeping, NoOffloading, Offloading
from jkv.status import UsageError
from jkv.tiers import BlockStore


class Update(NamedTuple):
    """New weights, and the treatment of blocks computed by the old ones."""

    params: Any
    draft_params: Any  # None keeps the draft model's
    recompute: bool  # preempt and recompute running sequences
    keep_cached: bool  # keep the prefix index
    version: int | None  # None increments the last one
    store_version: str | None  # of the weights in a store; None: a digest


class Versions:
    """Version of the weights, and lower bound for cached blocks.

    Attributes:
      newest: version of the weights of new windows.
      oldest_found: oldest possible version of a cached block.
    """

    def __init__(self) -> None:
        self.newest = self.oldest_found = 0

    def check(self, update: Update) -> None:
        """Raise for an inconsistent update."""
        if update.recompute and update.keep_cached:
            raise UsageError(
                "got recompute=True and keep_cached=True, which would hit the old "
                "blocks again; pass one of them"
            )
        if update.version is not None and update.version <= self.newest:
            raise UsageError(
                f"version must be > {self.newest}, the current version, got "
                f"{update.version}"
            )

    def advance(self, update: Update) -> None:
        self.newest = self.newest + 1 if update.version is None else update.version
        if not update.keep_cached:
            self.oldest_found = self.newest

    def begin(self, samples: Iterable[Sample]) -> None:
        """Set the version bound of samples that start computing now."""
        for sample in samples:
            sample.oldest_version = self.oldest_found

    def may_find(self, sample: Sample) -> bool:
        """Return True if all of a sample's blocks are as new as cached ones."""
        return sample.oldest_version >= self.oldest_found


def has_begun(sharing: list[Sample]) -> bool:
    """Return True if samples of one prompt can hold a block.

    A preempted sample has none, unless another one has computed their shared prompt.
    """
    if len(sharing) == 1:
        return sharing[0].stage == RequestStatus.RUNNING
    return any(s.stage != RequestStatus.WAITING or s.tokens for s in sharing)


logger = logging.getLogger("jkv.serving")


class QueueFull(RuntimeError):
    """The queue is full (`max_waiting`); submit again later.

    Attributes:
      seconds: estimated time until there is room, from the current rate of admissions.
        Each refused caller reserves room of its own.
    """

    def __init__(self, text: str, seconds: float = 1.0):
        super().__init__(text)
        self.seconds = seconds


class HostOptions(NamedTuple):
    """Host options of `Engine`."""

    detokenize: Detokenize | None
    max_waiting: int | None
    shares: Mapping[Client, float]
    max_results: int
    result_seconds: float
    park_seconds: float
    max_parked_bytes: int | None
    store: BlockStore | None
    store_share: float
    store_version: str | None
    checks: bool
    clock: Callable[[], float]


class _Window(NamedTuple):
    """A started window whose report has not been read."""

    samples: list[Sample | None]  # sample of each sequence at its start
    report: WindowReport
    started: float
    version: int  # of the weights at its start


class _Change(NamedTuple):
    """Requests to enqueue on the device, and marks of its sequences."""

    enqueued: list[tuple[RequestState, int]]  # as by `Queue.dispatch`
    cancelled: np.ndarray[Any, Any]  # bool[N]
    parked: np.ndarray[Any, Any] | None  # bool[N], as in `Change`

    def for_device(self, sizes: EngineSizes) -> Change:
        """Return the arrays; resumed requests have their cache rows by now."""
        arrivals = Arrivals.of(sizes, self.enqueued)
        return Change(arrivals, self.cancelled, self.parked)


class Scheduler:
    """Host side of an engine; one thread at a time runs its steps."""

    def __init__(self, loop: Loop, options: HostOptions):
        self.loop, self.measures, sizes = loop, Measures(), loop.sizes
        # Held while requests are read or changed, but not while the device computes.
        self.lock = threading.RLock()
        self.queue = Queue(sizes.num_prompts, sizes.config.num_samples, options.shares)
        self.measures.free_blocks = sum(loop.num_blocks)
        self.salt_numbers, self._keeping = SaltNumbers(), Keeping(loop, options.clock)
        self.offloading: Offloading | NoOffloading = NoOffloading()
        if options.store is not None:
            self.offloading = Offloading(
                loop,
                options.store,
                options.store_share,
                options.store_version,
                self.salt_numbers,
                self._keeping,
            )
        self.parking = Parking(
            loop,
            self._keeping,
            self.offloading,
            options.park_seconds,
            options.max_parked_bytes,
            options.clock,
            self.lock,
        )
        self._versions = Versions()
        self._sizes, self._options = sizes, options
        self._deadlines: dict[int, float] = {}  # of requests with a timeout
        self._ended = Results(
            options.max_results, options.result_seconds, options.clock
        )
        self._unread: _Window | None = None
        self._news = News()
        self._next_id = 0
        self._room = QueueWait()
        self._failure: BaseException | None = None

    def warm_up(self, progress: Progress | None) -> int:
        """Compile all programs; arguments and result as for `Loop.warm_up`."""
        num_programs = self.loop.warm_up(progress)
        self._keeping.warm_up()
        self.offloading.warm_up()
        return num_programs

    @property
    def is_idle(self) -> bool:
        if self._unread is not None or self._news:
            return False
        if self.queue.requests or self.queue.has_changes:
            return False
        return not (self.parking.has_changes or self._keeping.has_changes)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def has_room(self) -> bool:
        most = self._options.max_waiting
        return most is None or self.queue.num_waiting < most

    def add(self, request: CheckedRequest, resumed: Parked | None = None) -> int:
        """Enqueue a request, optionally to continue a parked one; return its number."""
        # The user's detokenizer may be slow, so it runs without the lock.
        stream, detokenize = None, self._options.detokenize
        if detokenize is not None:
            prompt = request.tokens.tolist()
            stream = TextStream(detokenize, prompt, request.stop_strings)
        with self.lock:
            if self._failure is not None:
                raise EngineError(
                    "the engine has failed; create a new one"
                ) from self._failure
            if not self.has_room:
                raise QueueFull(
                    f"at most max_waiting requests may be queued, got "
                    f"{self.queue.num_waiting} already; submit again later",
                    self._room.find_wait(self.measures.begun, self._options.clock()),
                )
            state, now = RequestState(request), self._options.clock()
            state.begin(self._next_id, now, stream)
            self._next_id += 1
            self.queue.add(state)
            if resumed is not None:
                resumed.resumed_by = state
            self._news.follow(state)
            if request.timeout is not None:
                self._deadlines[state.request_id] = now + request.timeout
            return state.request_id

    def find(self, request_id: int) -> RequestState:
        """Return an unfinished request, or a finished one with retained results."""
        with self.lock:
            going_on = self.queue.requests.get(request_id)
            state = going_on or self._ended.find(request_id)
        if state is None:
            raise KeyError(
                f"request_id {request_id} is unknown, or its results have expired; "
                f"increase Engine(max_results=, result_seconds=)"
            )
        return state

    def cancel(self, state: RequestState) -> bool:
        """Cancel a request's unfinished sequences; return True if there were any."""
        with self.lock:
            goes_on = not state.has_ended
            self._cancel(state)
            wake(state, self._cancel)
        return goes_on

    def cancel_all(self) -> None:
        for state in list(self.queue.requests.values()):
            self.cancel(state)

    def park(self, request_id: int) -> None:
        """Park the sequences of a request when they finish, or now if they have."""
        if isinstance(self.loop, SharedLoop):
            raise UsageError(
                "park() is not supported on a mesh of several processes; submit the "
                "sequence again, which hits its cached blocks"
            )
        if not self.loop.cache.metadata.index.is_there:
            raise UsageError(
                "park() requires a prefix cache; create the cache with "
                "CacheConfig(prefix_caching=True)"
            )
        state = self.find(request_id)
        with self.lock:
            state.is_parked = True
            self._mark()
            for sample in state.samples:
                self._park(state, sample)

    def unpark(self, request_id: int) -> bool:
        """Drop the parked sequences of a request; return True if there were any."""
        with self.lock:
            with contextlib.suppress(KeyError):
                self.find(request_id).is_parked = False
                self._mark()
            return self.parking.give_up(request_id)

    def count_refused(self) -> None:
        with self.lock:
            self.measures.refused += 1

    def _mark(self) -> None:
        """Update the device's marks of sequences to be parked; free other rows."""
        if self.loop.keeps_rows:
            self.queue.mark()

    def _park(self, state: RequestState, sample: Sample, sequence: int = -1) -> None:
        if sample.has_ended and sample.reason != FinishReason.FAILED:
            self.parking.add(state, sample, sequence)

    def read_stats(self) -> EngineStats:
        with self.lock:
            if self._unread is None and self.loop.num_free_blocks is not None:
                self.measures.free_blocks = int(self.loop.num_free_blocks)
            return self.measures.read(
                sum(each.num_blocks for each in self.loop.cache.metadata.block_groups),
                self._options.clock(),
                **self.queue.count_states(),
                version=self._versions.newest,
                **self.parking.count(),
                **self.offloading.read(),
            )

    def update_params(self, update: Update) -> int:
        """Replace the weights from the next window on; return their version."""
        self._versions.check(update)
        self.loop.replace_params(update.params, update.draft_params)
        try:
            # The window in progress uses the old weights; its report has the admitted
            # sequences.
            unread, self._unread = self._unread, None
            if unread is not None:
                self._read_window(unread)
            if not update.keep_cached:
                self.loop.forget_cached()
                self.parking.forget_blocks()
            self.offloading.begin_version(
                update.store_version, keep_cached=update.keep_cached
            )
            if update.recompute:
                self.loop.preempt_all()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        with self.lock:
            self._versions.advance(update)
            if not update.keep_cached:
                self.parking.forget_rows()
            if update.recompute:
                self._note_preempted()
            for sharing in self.queue.find_begun():
                if update.recompute or not has_begun(sharing):
                    self._versions.begin(s for s in sharing if not s.has_ended)
            return self._versions.newest

    def _note_preempted(self) -> None:
        """Mark running samples as preempted, which the device's counters exclude."""
        for sample in self.queue.find_computed():
            if sample is not None and sample.stage == RequestStatus.RUNNING:
                sample.stage = RequestStatus.PREEMPTED
                self.measures.add_preemption()

    # Steps.

    def step(self) -> list[Event]:
        """Start the next window, read the previous one, and return the new events."""
        try:
            window = self._start_window()
            unread, self._unread = self._unread, window
            if unread is not None:
                self._read_window(unread)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        with self.lock:
            return self._news.report(self._cancel)

    def _start_window(self) -> _Window | None:
        with self.lock:
            self._end_overdue()
            changes: list[_Change] = []
            while self.queue.has_changes:
                dispatched = self.queue.dispatch(self._sizes.num_lanes)
                parked = self.queue.take_parked() if self.loop.keeps_rows else None
                change = _Change(dispatched, self.queue.take_cancelled(), parked)
                changes.append(change)
                self.measures.begun.add(len(dispatched), self._options.clock())
                for state, first in dispatched:
                    self._versions.begin(self.queue.find_sharing(state, first))
            samples, version = self.queue.find_computed(), self._versions.newest
            has_work = self.queue.has_work
            lengths = self._find_lengths() if self.parking else []
            settle_classes = self._keeping.take()
        settle_classes()
        enqueued = [each for change in changes for each in change.enqueued]
        if self.parking:
            self.parking.settle(lengths, enqueued)
        requests = [each for each, _ in enqueued]
        self.offloading.settle(requests, is_running=self._unread is not None)
        started = self._options.clock()
        report = self.loop.start_window(
            [each.for_device(self._sizes) for each in changes],
            self._sizes.num_steps if has_work else 0,
        )
        if self._options.checks and (changes or report):
            check(self.loop.cache)
        return None if report is None else _Window(samples, report, started, version)

    def _find_lengths(self) -> list[int]:
        """Return bounds of the sequence lengths on the device after the next window."""
        ahead = 2 * self._sizes.max_window_tokens  # the previous window is unread
        lengths = []
        for sample in filter(None, self.queue.find_computed()):
            request = self.queue.requests[sample.request_id].request
            num_new = min(request.max_new_tokens, len(sample.tokens) + ahead)
            lengths.append(len(request.tokens) + num_new)
        return lengths

    def _read_window(self, window: _Window) -> None:
        report = jax.device_get(window.report)
        # The user's detokenizer may be slow, so it runs without the lock.
        news = [
            (sample, part, _read(sample, part))
            for part in report.read_news()
            if (sample := window.samples[part.sequence]) is not None
        ]
        num_tokens = 0
        with self.lock:
            now = self._options.clock()
            for sample, part, brought in news:
                if sample.has_ended:
                    continue
                sample.stage = part.stage
                sample.cached_tokens = part.cached_tokens
                if not part.tokens and part.reason == FinishReason.RUNNING:
                    continue
                state = self.queue.requests[sample.request_id]
                self.queue.charge(state, len(part.tokens))
                num_tokens += self._extend(sample, part, brought, window.version)
                self.measures.add_times(state, sample, len(part.tokens), now)
            self.measures.add_window(report.statistics, num_tokens, now)
            prompt_tokens = int(report.statistics.prompt_tokens)
            self.offloading.note_window(prompt_tokens, window.started, now)
            self.measures.free_blocks = int(report.num_free_blocks)

    def _extend(
        self,
        sample: Sample,
        part: SequenceNews,  # report of a window for the sample
        brought: Extension | BaseException,  # accepted part, or an error
        version: int,
    ) -> int:
        """Append the accepted tokens of a window; return their number."""
        state = self.queue.requests[sample.request_id]
        self._news.note(state)
        if isinstance(brought, BaseException):
            self._fail_all([state], brought)
            return 0
        taken, stream = brought
        sample.take(taken, stream, version)
        if taken.reason != FinishReason.RUNNING:
            goes_on = part.reason == FinishReason.RUNNING
            self._end(state, sample, taken.reason, is_computed=goes_on)
        return len(taken.tokens)

    # Finishing.

    def _end_overdue(self) -> None:
        now = self._options.clock()
        due = [number for number, time in self._deadlines.items() if time <= now]
        for state in [self.queue.requests[number] for number in due]:
            self._end_all(state, FinishReason.DEADLINE)

    def _cancel(self, state: RequestState) -> None:
        self._end_all(state, FinishReason.CANCELLED)

    def _end_all(self, state: RequestState, reason: FinishReason) -> None:
        for sample in state.samples:
            if not sample.has_ended:
                self._end(state, sample, reason, is_computed=True)

    def _end(
        self,
        state: RequestState,
        sample: Sample,
        reason: FinishReason,
        *,
        is_computed: bool,
    ) -> None:
        """Finish a sequence, for any reason; its blocks are freed."""
        self._news.note(state)
        is_last = self.queue.end(sample, reason, is_computed=is_computed)
        if state.is_parked:
            self._mark()
            keeps_row = self.loop.keeps_rows and self._versions.may_find(sample)
            self._park(state, sample, sample.sequence if keeps_row else -1)
        if state.request.keep and reason != FinishReason.FAILED:
            self._keeping.add(state, sample)
        if is_last:
            self._deadlines.pop(state.request_id, None)
            self._ended.put(state)
            self.measures.add_end(state.status)

    def _fail(self, error: BaseException) -> None:
        """Fail the requests on the device, and restart with an empty generation."""
        with self.lock:
            self._unread = None
            computed = [each for each in self.queue.find_computed() if each is not None]
            numbers = dict.fromkeys(sample.request_id for sample in computed)
            if isinstance(error, Exception):  # not an interrupt
                count = len(numbers)
                logger.error("a step of %d requests failed", count, exc_info=error)
            self._fail_all([self.queue.requests[number] for number in numbers], error)
            self.queue.take_cancelled()
            try:
                self.loop.start_again()
            except Exception as failure:
                logger.error("the engine cannot continue: %s", failure)
                failure.__cause__ = error
                self._failure = failure
                self._fail_all(list(self.queue.requests.values()), failure)
            self.measures.free_blocks = sum(self.loop.num_blocks)

    def _fail_all(self, requests: list[RequestState], error: BaseException) -> None:
        for state in requests:
            state.error = error
            self._end_all(state, FinishReason.FAILED)


def _read(sample: Sample, part: SequenceNews) -> Extension | BaseException:
    """Return the accepted part of a window, or the exception of the detokenizer."""
    try:
        return sample.read(part)
    except (Exception, asyncio.CancelledError) as error:
        return error
