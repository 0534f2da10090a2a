"""A bar on a terminal while a grammar is compiled, where that takes over a second."""

import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence

_SILENT_SECONDS = 1.0


def track(steps: Sequence[int], text: str) -> Iterator[int]:
    """Yield what is in a sequence; show after a second how far it has come.

    Nothing is shown without the package rich, or where nobody looks (no terminal).
    """
    began = time.monotonic()
    bar = None
    for done, step in enumerate(steps):
        yield step
        if bar is None and time.monotonic() - began > _SILENT_SECONDS:
            if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
                began = float("inf")
                continue
            bar = _Bar(text, len(steps))
        if bar is not None:
            bar.show(done + 1)
    if bar is not None:
        bar.close()


class _Bar:
    """rich's own, on the standard error."""

    def __init__(self, text: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(text, total=total)
        self._progress.start()

    def show(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def close(self) -> None:
        self._progress.stop()
