"""Progress on the terminal: compilation, a batch's progress, speed, the block pool."""

import time
from types import TracebackType

from pool_map.cells import as_text, draw_overview
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from jkv.serving import Engine

# Drawing the pool waits for the device.
SECONDS_A_FRAME = 0.5


def warm_up(engine: Engine) -> int:
    """Compile an engine's programs with a progress bar; return their number."""
    columns = "compiling {task.description}", BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")

        def show(name: str, done: int, count: int) -> None:
            bar.update(task, description=name, completed=done, total=count)
            bar.refresh()

        return engine.warm_up(show)


class Display:
    """Live progress display on standard error; off if that is not a terminal."""

    def __init__(self, engine: Engine, total: int):
        console = Console(stderr=True)
        self._engine, self._is_shown = engine, console.is_terminal
        self._bar = Progress(
            "results", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        )
        self._task = self._bar.add_task("", total=total)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def __enter__(self) -> "Display":
        if self._is_shown:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_shown:
            self._live.stop()

    def update(self, num_done: int) -> None:
        """Redraw, at most once per `SECONDS_A_FRAME`."""
        now = time.monotonic()
        if not self._is_shown or now - self._drawn < SECONDS_A_FRAME:
            return
        self._drawn = now
        self._bar.update(self._task, completed=num_done)
        stats = self._engine.stats()
        caption = (
            f"{stats.tokens_per_second:.0f} tokens/s, {stats.running} run, "
            f"{stats.waiting} wait, {stats.preemptions} preempted so far, "
            f"{stats.hit_rate:.0%} of prompts found"
        )
        cells = draw_overview(self._engine.cache)
        self._live.update(Group(self._bar, as_text(cells, caption)), refresh=True)
