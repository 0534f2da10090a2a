"""Shared code of the benchmarks: interleaved timing, machine information, tables, JSON.

Compared cases run interleaved: every round takes one sample of each in a random order,
so that background load affects all of them. Figures are medians with the 10th and 90th
percentile; a ratio is the median of the ratios within rounds.
"""

import dataclasses
import datetime
import gc
import json
import os
import pathlib
import platform
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np

import jkv

MIN_ROUNDS = 5  # minimum samples of a slow case
TURN = "JKV_TURN"  # environment variable: path prefix of the turn files


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A timed case.

    `run(prepare())` is one sample; only `run` is timed, and must block until the work
    is done (`jax.block_until_ready`). A sample's time is divided by `calls`.
    """

    name: str  # unique among the cases of a measurement
    prepare: Callable[[], Any]
    run: Callable[[Any], Any]
    calls: int = 1
    # Raises if the result of `run` is wrong.
    check: Callable[[Any], None] | None = None
    labels: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for the row


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """Seconds per call of one case, by round."""

    seconds: Mapping[int, float]

    @property
    def median(self) -> float:
        """Median seconds per call."""
        return statistics.median(self.seconds.values())

    def percentile(self, percent: int) -> float:
        """Return the given percentile of the seconds per call."""
        ordered = sorted(self.seconds.values())
        return ordered[round((len(ordered) - 1) * percent / 100)]

    def ratio_to(self, other: "Samples") -> float:
        """Return the median, over common rounds, of this time over the other's."""
        common = self.seconds.keys() & other.seconds.keys()
        return statistics.median(self.seconds[r] / other.seconds[r] for r in common)

    def row(self, scale: float = 1e6) -> dict[str, Any]:
        """Return median and spread, in microseconds unless scaled otherwise."""
        return {
            "median": self.median * scale,
            "p10": self.percentile(10) * scale,
            "p90": self.percentile(90) * scale,
            "samples": len(self.seconds),
        }


def interleave(
    cases: Sequence[Case],
    *,
    rounds: int,
    warmup: int = 3,
    seconds_per_case: float = 20.0,
    seed: int = 0,
) -> dict[str, Samples]:
    """Time all cases in one process, one sample of each per round.

    Args:
      cases: with unique names.
      rounds: samples of each case.
      warmup: discarded samples of each case before the first round, compilation
        included.
      seconds_per_case: a case too slow for this runs in fewer rounds, evenly spread,
        but in at least `MIN_ROUNDS`.
      seed: of the order of the cases in each round.
    """
    if len({case.name for case in cases}) < len(cases):
        raise ValueError("cases must have unique names")
    every = {}
    for case in cases:
        began = time.perf_counter()
        for _ in range(warmup):
            began = time.perf_counter()
            result = case.run(case.prepare())
        if case.check:
            case.check(result)
        fits = seconds_per_case / max(time.perf_counter() - began, 1e-9)
        wanted = min(rounds, max(MIN_ROUNDS, int(fits)))
        every[case.name] = max(1, rounds // wanted)
        progress(f"warmed up: {case.name}")
    seconds: dict[str, dict[int, float]] = {case.name: {} for case in cases}
    order = random.Random(seed)
    gc.collect()
    gc.disable()  # garbage collection would be charged to the triggering case
    try:
        for round_ in range(rounds):
            due = [case for case in cases if round_ % every[case.name] == 0]
            for case in order.sample(due, len(due)):
                state = case.prepare()
                began = time.perf_counter()
                case.run(state)
                taken = time.perf_counter() - began
                seconds[case.name][round_] = taken / case.calls
                del state
            progress(f"round {round_ + 1} of {rounds}")
    finally:
        gc.enable()
        progress("")
    return {name: Samples(taken) for name, taken in seconds.items()}


def machine() -> dict[str, Any]:
    """Return date, device, versions and load."""
    device = jax.devices()[0]
    versions = {"python": platform.python_version()}
    for package in (jax, jaxlib, np, jkv):
        versions[package.__name__] = package.__version__
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device.device_kind,
        "platform": device.platform,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "versions": versions,
    }


def header(title: str, where: Mapping[str, Any]) -> str:
    """Return the header lines of a benchmark's tables."""
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items())
    return (
        f"{title}\n"
        f"  {where['date']}, {where['device']} ({where['cpu']}, {where['cores']} cores,"
        f" load {where['load'][0]})\n"
        f"  {versions}"
    )


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Return rows as aligned plain text.

    Args:
      rows: to show; missing values are left blank.
      columns: key and heading of each column, in order.
    """
    body = [[_cell(row.get(key)) for key in columns] for row in rows]
    numeric = [
        all(_is_number(row.get(key)) for row in rows if row.get(key) is not None)
        for key in columns
    ]
    widths = [
        max(map(len, cells)) for cells in zip(columns.values(), *body, strict=True)
    ]

    def line(cells: Iterable[str]) -> str:
        justified = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(justified).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(columns.values()), rule, *map(line, body)])


def judge(
    what: str, measured: float, limit: float, *, at_least: bool = False
) -> dict[str, Any]:
    """Return a row of a table of limits: the measured value, and "met" or "MISSED"."""
    is_met = measured >= limit if at_least else measured <= limit
    return {
        "what": what,
        "measured": measured,
        "limit": f"{'at least' if at_least else 'at most'} {limit}",
        "": "met" if is_met else "MISSED",
    }


def save(path: pathlib.Path, run: Mapping[str, Any]) -> None:
    """Add a run to a JSON file, a list of runs, replacing an equivalent one.

    Runs are equivalent if benchmark, device, processor and versions agree.
    """

    def likeness(run: Mapping[str, Any]) -> Any:
        where = run["machine"]
        return [run["benchmark"], where["device"], where["cpu"], where["versions"]]

    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    kept = [old for old in runs if likeness(old) != likeness(run)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": [*kept, run]}, indent=1) + "\n")


def save_rows(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows of one part of a run, replacing earlier ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(rows), indent=1) + "\n")


def wait_for_turn() -> None:
    """Wait for exclusive use of the device, if another process coordinates turns.

    Compile before this call, so that processes compile concurrently and are timed one
    after another (`gpu_brief.py`).
    """
    turn = os.environ.get(TURN)
    if turn is None:
        return
    pathlib.Path(f"{turn}.ready").touch()
    while not pathlib.Path(f"{turn}.go").exists():
        time.sleep(0.05)


def find_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def progress(text: str) -> None:
    """Report progress: rewrite the last line of a terminal, or append to a log."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        now = datetime.datetime.now(datetime.UTC).strftime("%H:%M:%S")
        print(f"{now} {text}", file=sys.stderr, flush=True)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{value:,}" if _is_number(value) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cpu_name() -> str:
    """Return the processor's name, which `platform` lacks on Linux."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
