"""Results of a request, and the callers that wait for them.

Completions come at the end, events during generation. Without a background thread,
waiting threads take turns at running steps (`Turns`). With one, it runs as long as
there is work. A consumer that closes its iterator early cancels its request.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from jkv.decoding import FinishReason
from jkv.metadata.requests import check_static
from jkv.serving.request.request import RequestState
from jkv.status import UsageError


class Completion(NamedTuple):
    """Completion of one sequence of a request."""

    request_id: int  # from `submit`
    sample: int  # index among the request's n sequences
    tokens: list[int]  # new tokens, including a final stop token or string
    logprobs: list[float]  # of each token under the model
    reason: FinishReason  # RUNNING while unfinished
    text: str | None  # without a stop string; None without `detokenize`
    # Version of the weights that produced each token (`Engine.update_params`).
    versions: Sequence[int] = ()
    # Lower bound for the versions of the keys and values attended to by each token.
    context_versions: Sequence[int] = ()
    # Number of prompt tokens hit in the prefix cache.
    cached_tokens: int = 0


class Event(NamedTuple):
    """Progress of one sequence since its last event."""

    request_id: int  # from `submit`
    sample: int  # index among the request's n sequences
    tokens: list[int]  # new tokens
    logprobs: list[float]  # their log-probabilities
    text: str  # new text that is final; empty without `detokenize`
    reason: FinishReason  # RUNNING unless this is the last event
    cached_tokens: int = 0  # as in `Completion`


def read_completions(state: RequestState) -> list[Completion]:
    return [
        Completion(
            state.request_id,
            sample.index,
            list(sample.tokens),
            list(sample.logprobs),
            sample.reason,
            sample.text,
            list(sample.versions),
            list(sample.context_versions),
            sample.cached_tokens,
        )
        for sample in state.samples
    ]


class Cursor:
    """Read position of one consumer in a request."""

    def __init__(self, state: RequestState):
        self._state = state
        self._tokens = [0] * len(state.samples)
        self._shown = [0] * len(state.samples)
        self._is_over = [False] * len(state.samples)

    @property
    def is_over(self) -> bool:
        return all(self._is_over)

    def read(self) -> list[Event]:
        """Return an event for each sequence with unread progress."""
        events = []
        for i, sample in enumerate(self._state.samples):
            if self._is_over[i]:
                continue
            text, start = sample.text or "", self._tokens[i]
            if len(sample.tokens) == start and not sample.has_ended:
                continue
            self._tokens[i], self._is_over[i] = len(sample.tokens), sample.has_ended
            fresh, self._shown[i] = text[self._shown[i] :], len(text)
            events.append(
                Event(
                    self._state.request_id,
                    i,
                    sample.tokens[start:],
                    sample.logprobs[start:],
                    fresh,
                    sample.reason,
                    sample.cached_tokens,
                )
            )
        return events


class Results:
    """Finished requests, limited in number and age; the oldest are dropped first."""

    def __init__(self, most: int, seconds: float, clock: Callable[[], float]):
        check_static("max_results", most, 0)
        if not seconds >= 0:
            raise UsageError(f"result_seconds must be >= 0, got {seconds}")
        self._most, self._seconds, self._clock = most, seconds, clock
        self._entries: OrderedDict[int, tuple[float, RequestState]] = OrderedDict()

    def put(self, state: RequestState) -> None:
        over = self._clock() + self._seconds
        self._entries[state.request_id] = over, state
        self._forget_old()

    def find(self, request_id: int) -> RequestState | None:
        self._forget_old()
        entry = self._entries.get(request_id)
        return None if entry is None else entry[1]

    def _forget_old(self) -> None:
        now, entries = self._clock(), self._entries
        while entries and (
            len(entries) > self._most or next(iter(entries.values()))[0] <= now
        ):
            entries.popitem(last=False)


class News:
    """Requests that have changed since the last step reported events."""

    def __init__(self) -> None:
        self._changed: dict[int, RequestState] = {}
        self._cursors: dict[int, Cursor] = {}  # of unfinished requests

    def __bool__(self) -> bool:
        return bool(self._changed)

    def follow(self, state: RequestState) -> None:
        self._cursors[state.request_id] = Cursor(state)

    def note(self, state: RequestState) -> None:
        self._changed[state.request_id] = state

    def report(self, left: Callable[[RequestState], None]) -> list[Event]:
        """Return the new events and wake consumers; `left` as for `wake`."""
        events = []
        changed, self._changed = self._changed, {}
        for state in changed.values():
            events += self._cursors[state.request_id].read()
            if state.has_ended:
                del self._cursors[state.request_id]
            wake(state, left)
        return events


def wake(state: RequestState, left: Callable[[RequestState], None]) -> None:
    """Wake the consumers of a request; call `left` if one's event loop is closed."""
    for listener in list(state.listeners):
        try:
            listener()
        except RuntimeError:  # the event loop is closed
            state.listeners.remove(listener)
            left(state)


logger = logging.getLogger("jkv.serving")

Found = TypeVar("Found")
Result = TypeVar("Result")


class StepRunner(Generic[Result]):
    """Lock of the steps, and condition variable of threads waiting for results."""

    def __init__(
        self,
        step: Callable[[], Result],
        is_idle: Callable[[], bool],
        lock: threading.RLock,  # held while requests are read or changed
    ):
        self.lock, self._changed = lock, threading.Condition(lock)
        self._turn = threading.Lock()
        self._step, self._is_idle = step, is_idle
        self._thread: threading.Thread | None = None
        self._is_closing = False

    @property
    def has_thread(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_alive()

    def run_step(self) -> Result:
        """Run a step once no other thread runs one; return its result."""
        return self.exclusively(self._step)

    def exclusively(self, function: Callable[[], Found]) -> Found:
        """Run a function in place of a step.

        The caller's transfer guard does not apply: a step copies tokens between host
        and device.
        """
        try:
            with self._turn, jax.transfer_guard("allow"):
                return function()
        finally:
            self.notify()

    def notify(self) -> None:
        """Wake all waiting threads after a change."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, look: Callable[[], Found]) -> Found:
        """Run steps, or wait for them, until `look()` is true; return its value."""
        while True:
            with self._changed:
                found = look()
                if found:
                    return found
                if self.has_thread and self._thread is not threading.current_thread():
                    # The timeout covers a thread that ends between the check and the
                    # wait.
                    self._changed.wait(timeout=1.0)
                    continue
            self.run_step()

    def start(self) -> None:
        """Start the background thread unless it runs already."""
        with self.lock:
            if self.has_thread:
                return
            self._is_closing = False
            self._thread = threading.Thread(
                target=self._run, name="jkv-engine", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current step."""
        with self._changed:
            thread, self._is_closing = self._thread, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._thread = None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or not self._is_idle())
                if self._is_closing:
                    return
            try:
                self.run_step()
            except BaseException:
                # The requests have failed with this error; the engine serves others.
                logger.exception("an engine step raised a BaseException")


Item = TypeVar("Item")


class CancellingIterator(Generator[Item, Any, None]):
    """An iterator that cancels a request when it is closed, also before it starts."""

    def __init__(self, items: Generator[Item, Any, None], cancel: Callable[[], object]):
        self._items, self._cancel = items, cancel

    def send(self, value: Any) -> Item:
        return self._items.send(value)

    def throw(self, *error: Any) -> Item:
        return self._items.throw(*error)

    def close(self) -> None:
        self._items.close()
        self._cancel()


class AsyncCancellingIterator(AsyncGenerator[Item, Any]):
    """The asynchronous form of `CancellingIterator`."""

    def __init__(self, items: AsyncGenerator[Item, Any], cancel: Callable[[], object]):
        self._items, self._cancel = items, cancel

    async def asend(self, value: Any) -> Item:
        return await self._items.asend(value)

    async def athrow(self, *error: Any) -> Item:
        return await self._items.athrow(*error)

    async def aclose(self) -> None:
        await self._items.aclose()
        self._cancel()


def read_events(
    runner: StepRunner[list[Event]],  # run while there is no new event
    state: RequestState,
    cancel: Callable[[], object],  # if the consumer drops the started iterator
) -> Generator[Event, None, None]:
    """Yield the events of a request until it has finished; raise if it failed."""
    cursor = Cursor(state)
    try:
        while not cursor.is_over:
            yield from runner.wait_for(cursor.read)
    finally:
        cancel()
    state.raise_error()


async def await_events(
    runner: StepRunner[list[Event]],
    state: RequestState,
    cancel: Callable[[], object],
) -> AsyncGenerator[Event, None]:
    """Yield the same events asynchronously, with steps run by the engine's thread."""
    cursor, has_news = Cursor(state), asyncio.Event()
    running = asyncio.get_running_loop()

    def wake() -> None:
        running.call_soon_threadsafe(has_news.set)

    with runner.lock:
        state.listeners.append(wake)
    runner.start()
    try:
        while not cursor.is_over:
            has_news.clear()
            with runner.lock:
                events = cursor.read()
            for event in events:
                yield event
            if not events:
                await has_news.wait()
    finally:
        with runner.lock:
            if wake in state.listeners:
                state.listeners.remove(wake)
        cancel()
    state.raise_error()
