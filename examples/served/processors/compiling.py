"""Compilation of grammars in separate processes.

A schema may need many seconds of Python. A worker process compiles it, and is killed
after the deadline; the server's own threads only wait.
"""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection

from jkv.grammar import Vocabulary

from ..asking.languages import Compiled, Language
from ..mistakes import Refused

MOST_SECONDS = 20.0  # per grammar
MOST_PROCESSES = 4  # at a time; further grammars wait


class Compilers:
    """Pool of compiling processes. The methods are thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Store the vocabulary; start no process yet."""
        self._vocabulary = vocabulary
        self._threads = ThreadPoolExecutor(MOST_PROCESSES, "jkv-grammars")
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._under_way: dict[Language, Future[Compiled]] = {}
        self._lock = threading.RLock()

    def start(self) -> None:
        """Start a process in advance for the first grammar."""
        self._give_back(self._take_worker())

    def close(self) -> None:
        """Kill all processes; running compilations fail."""
        with self._lock:
            workers = list(self._workers)
            self._workers, self._idle = set(), []
        for worker in workers:
            worker.end()

    def compile(self, language: Language, deadline: float) -> Compiled:
        """Return a language's grammar; simultaneous calls share one compilation.

        Args:
            language: the language.
            deadline: on the monotonic clock, in seconds.

        Raises:
            Refused: if the language is invalid, or the deadline has passed.
        """
        with self._lock:
            future = self._under_way.get(language)
            if future is None:
                future = self._threads.submit(self._compile, language)
                self._under_way[language] = future
                future.add_done_callback(lambda _: self._under_way.pop(language, None))
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise _refuse_overdue(language) from None

    def _compile(self, language: Language) -> Compiled:
        worker = self._take_worker()
        try:
            compiled = worker.compile(language)
        except Refused:
            self._give_back(worker)
            raise
        except (TimeoutError, EOFError, OSError) as error:
            with self._lock:
                self._workers.discard(worker)
            worker.end()
            if isinstance(error, TimeoutError):
                raise _refuse_overdue(language) from None
            text = f"{language.param} cannot be compiled: its process has died"
            raise Refused(text, language.param) from error
        self._give_back(worker)
        return compiled

    def _take_worker(self) -> "_Worker":
        with self._lock:
            if self._idle:
                return self._idle.pop()
            worker = _Worker(self._vocabulary)
            self._workers.add(worker)
            return worker

    def _give_back(self, worker: "_Worker") -> None:
        with self._lock:
            if worker in self._workers:
                self._idle.append(worker)


class _Worker:
    """Process that compiles one grammar at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Not forked, as JAX has threads.
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(
            target=_work, args=(there, vocabulary), daemon=True
        )
        self._process.start()
        self._is_ready = False
        there.close()

    def compile(self, language: Language) -> Compiled:
        """Return a grammar.

        Raises:
            Refused: if the language is invalid.
            TimeoutError: after `MOST_SECONDS`; the process is still compiling.
            EOFError: if the process has died.
        """
        if not self._is_ready:
            # The start of the process does not count towards the time limit.
            self._is_ready = self._pipe.recv()
        self._pipe.send(language)
        if not self._pipe.poll(MOST_SECONDS):
            raise TimeoutError
        found = self._pipe.recv()
        if isinstance(found, str):
            raise Refused(found, language.param)
        assert isinstance(found, Compiled)
        return found

    def end(self) -> None:
        """Kill the process, even while it compiles."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _work(pipe: Connection, vocabulary: Vocabulary) -> None:
    """Compile languages from the pipe until the server closes it."""
    import jax
    import numpy as np

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server kills this process
    os.nice(5)
    jax.config.update("jax_platforms", "cpu")  # the server uses the device
    pipe.send(True)
    while True:
        try:
            language: Language = pipe.recv()
        except EOFError:
            return
        try:
            compiled = language.compile(vocabulary)
            grammar = jax.tree.map(np.asarray, compiled.grammar)
            found = compiled._replace(grammar=grammar)
        except Refused as error:
            found = str(error)
        pipe.send(found)


def _refuse_overdue(language: Language) -> Refused:
    return Refused(
        f"{language.param} takes more than {MOST_SECONDS:.0f} seconds to compile, or "
        f"than the request's timeout; send a smaller one",
        language.param,
    )
