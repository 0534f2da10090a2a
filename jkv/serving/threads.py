"""Threads that run the engine's steps, and threads that wait for a request.

Without a background thread, waiting threads take turns at running steps. With one, it
runs as long as there is work. A consumer that closes its iterator early cancels its
request.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Generic, TypeVar

import jax

from jkv.serving.request.request import RequestState
from jkv.serving.request.results import Cursor, Event

logger = logging.getLogger("jkv.serving")

Found = TypeVar("Found")
Brought = TypeVar("Brought")


class Turns(Generic[Brought]):
    """Lock of the steps, and condition variable of threads waiting for results."""

    def __init__(
        self,
        step: Callable[[], Brought],
        is_idle: Callable[[], bool],
        lock: threading.RLock,  # held while requests are read or changed
    ):
        self.lock, self._news = lock, threading.Condition(lock)
        self._turn = threading.Lock()
        self._step, self._is_idle = step, is_idle
        self._thread: threading.Thread | None = None
        self._is_closing = False

    @property
    def has_thread(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_alive()

    def take(self) -> Brought:
        """Run a step once no other thread runs one; return its result."""
        return self.with_turn(self._step)

    def with_turn(self, function: Callable[[], Found]) -> Found:
        """Run a function in place of a step.

        The caller's transfer guard does not apply: a step copies tokens between host
        and device.
        """
        try:
            with self._turn, jax.transfer_guard("allow"):
                return function()
        finally:
            self.tell()

    def tell(self) -> None:
        """Wake all waiting threads after a change."""
        with self._news:
            self._news.notify_all()

    def wait_for(self, look: Callable[[], Found]) -> Found:
        """Run steps, or wait for them, until `look()` is true; return its value."""
        while True:
            with self._news:
                found = look()
                if found:
                    return found
                if self.has_thread and self._thread is not threading.current_thread():
                    # The timeout covers a thread that ends between the check and the
                    # wait.
                    self._news.wait(timeout=1.0)
                    continue
            self.take()

    def start(self) -> None:
        """Start the background thread unless it runs already."""
        with self.lock:
            if self.has_thread:
                return
            self._is_closing = False
            self._thread = threading.Thread(
                target=self._go_on, name="jkv-engine", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current step."""
        with self._news:
            thread, self._is_closing = self._thread, True
            self._news.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._thread = None

    def _go_on(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._is_closing or not self._is_idle())
                if self._is_closing:
                    return
            try:
                self.take()
            except BaseException:
                # The requests have failed with this error; the engine serves others.
                logger.exception("an engine step raised a BaseException")


def read_events(
    turns: Turns[list[Event]],  # run while there is no new event
    state: RequestState,
    cancel: Callable[
        [RequestState], object
    ],  # called when the consumer closes the iterator
) -> Iterator[Event]:
    """Yield the events of a request until it has finished; raise if it failed."""
    cursor = Cursor(state)
    try:
        while not cursor.is_over:
            yield from turns.wait_for(cursor.read)
    finally:
        cancel(state)
    state.raise_error()


async def await_events(
    turns: Turns[list[Event]],
    state: RequestState,
    cancel: Callable[[RequestState], object],
) -> AsyncGenerator[Event, None]:
    """Yield the same events asynchronously, with steps run by the engine's thread."""
    cursor, has_news = Cursor(state), asyncio.Event()
    running = asyncio.get_running_loop()

    def wake() -> None:
        running.call_soon_threadsafe(has_news.set)

    with turns.lock:
        state.listeners.append(wake)
    turns.start()
    try:
        while not cursor.is_over:
            has_news.clear()
            with turns.lock:
                events = cursor.read()
            for event in events:
                yield event
            if not events:
                await has_news.wait()
    finally:
        with turns.lock:
            if wake in state.listeners:
                state.listeners.remove(wake)
        cancel(state)
        turns.tell()
    state.raise_error()
