"""Whose turn it is: threads that wait take turns at the steps, or one does all of them.

Without a thread of its own an engine goes on while somebody waits for it. With one it
goes on as long as there is work.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")
Brought = TypeVar("Brought")


class Turns(Generic[Brought]):
    """Steps, one at a time, and those who wait for what they bring.

    Attributes:
      lock: held while the books are read or changed; not while the device computes.
    """

    def __init__(self, step: Callable[[], Brought], is_idle: Callable[[], bool]):
        self.lock = threading.RLock()
        self._news = threading.Condition(self.lock)
        self._turn = threading.Lock()
        self._step, self._is_idle = step, is_idle
        self._thread: threading.Thread | None = None
        self._is_closing = False

    @property
    def has_thread(self) -> bool:
        """Whether a thread of its own does the steps."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def take(self) -> Brought:
        """Do a step as soon as nobody else does one; return what it brings."""
        return self.with_turn(self._step)

    def with_turn(self, function: Callable[[], Found]) -> Found:
        """Do something else in the place of a step."""
        with self._turn:
            result = function()
        self.tell()
        return result

    def tell(self) -> None:
        """Wake those who wait: something has changed."""
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
            self.take()
