"""Threads: which one does the engine's steps, and how others wait for a request.

Without a thread of its own an engine goes on while a thread waits for a result: the
threads that wait take turns at the steps. With one it goes on as long as there is work.
A consumer of events that leaves before the end cancels its request.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Generic, TypeVar

import jax

from jkv.serving.request.request import Request
from jkv.serving.request.results import Cursor, Event

logger = logging.getLogger("jkv.serving")

Found = TypeVar("Found")
Brought = TypeVar("Brought")


class Turns(Generic[Brought]):
    """Steps, one at a time, and the threads that wait for what they bring."""

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
        """Do a step as soon as no other thread does one; return what it brings."""
        return self.with_turn(self._step)

    def with_turn(self, function: Callable[[], Found]) -> Found:
        """Do something else instead of a step.

        A step moves tokens between host and device: a transfer guard of the caller is
        for the caller's code.
        """
        try:
            with self._turn, jax.transfer_guard("allow"):
                return function()
        finally:
            self.tell()

    def tell(self) -> None:
        """Wake the threads that wait: something has changed."""
        with self._news:
            self._news.notify_all()

    def wait_for(self, look: Callable[[], Found]) -> Found:
        """Return what `look()` finds, once it is true; take turns meanwhile."""
        while True:
            with self._news:
                found = look()
                if found:
                    return found
                if self.has_thread and self._thread is not threading.current_thread():
                    # A thread that was ended in between is noticed in a while.
                    self._news.wait(timeout=1.0)
                    continue
            self.take()

    def start(self) -> None:
        """Let a thread do the steps from now on."""
        with self.lock:
            if self.has_thread:
                return
            self._is_closing = False
            self._thread = threading.Thread(
                target=self._go_on, name="jkv-engine", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the thread after its step."""
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
                # The requests have failed with the cause; others are served on.
                logger.exception("a step ended with what is no Exception")


def read_events(
    turns: Turns[list[Event]],  # waited for where nothing is new
    request: Request,
    cancel: Callable[[Request], object],  # called if the consumer leaves before the end
) -> Iterator[Event]:
    """Yield what is new of a request until it has ended; raise if it failed."""
    cursor = Cursor(request)
    try:
        while not cursor.is_over:
            yield from turns.wait_for(cursor.read)
    finally:
        cancel(request)
    request.raise_error()


async def await_events(
    turns: Turns[list[Event]], request: Request, cancel: Callable[[Request], object]
) -> AsyncGenerator[Event, None]:
    """Do the same in an event loop; the engine's thread does the steps."""
    cursor, has_news = Cursor(request), asyncio.Event()
    running = asyncio.get_running_loop()

    def wake() -> None:
        running.call_soon_threadsafe(has_news.set)

    with turns.lock:
        request.listeners.append(wake)
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
            if wake in request.listeners:
                request.listeners.remove(wake)
        cancel(request)
        turns.tell()
    request.raise_error()
