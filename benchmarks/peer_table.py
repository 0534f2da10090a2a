"""Summary table of jkv and other projects, from the newest results.

    python benchmarks/peer_table.py [--results FOLDER]

`make peers` runs the half-hour of measurements that need no GPU, and then prints the
table; `make peers PEERS=--kept` prints it from stored results. A ratio above 1 means
that jkv is faster. Each line has its device and date, since results are of different
days and machines.
"""

import argparse
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

RESULTS = pathlib.Path(__file__).parent / "results"
POOL = 65_536  # the larger pool of operations.py

Run = dict[str, Any]


class Line(NamedTuple):
    """The same work by jkv and by a peer."""

    what: str
    peer: str
    ours: float
    theirs: float
    unit: str
    less_is_better: bool

    @property
    def ratio(self) -> float:
        """Speedup of jkv over the peer."""
        pair = self.theirs, self.ours
        return pair[0] / pair[1] if self.less_is_better else pair[1] / pair[0]


def read_operations(run: Run) -> Iterator[Line]:
    """Yield append, free and fork: a step's bookkeeping, eager or in a scan."""
    medians = {
        (row["operation"], row["contender"]): row["median"]
        for row in run["rows"]
        if row["pool"] == POOL and row.get("storage") != "storage donated"
    }
    for (operation, peer), median in medians.items():
        if peer.startswith(("jkv", "a jitted", "bare")):
            continue
        way = "in a scan" if peer.endswith("in a scan") else "eager, donated"
        ours = medians.get((operation, f"jkv, {way}"))
        if ours is not None:
            what = f"{operation}, {POOL:,} blocks, {way.partition(',')[0]}"
            yield Line(what, peer, ours, median, "us", True)


def read_rollouts(run: Run) -> Iterator[Line]:
    """Yield whole queues of requests."""
    rates = {row["contender"]: row["tokens/s"] for row in run["rows"]}
    for peer, rate in rates.items():
        if not peer.startswith("jkv"):
            what = run.get("title", run["benchmark"])
            yield Line(what, peer, rates["jkv"], rate, "tokens/s", False)


def read_generate(run: Run) -> Iterator[Line]:
    """Yield whole generations from a checkpoint."""
    for row in run["rows"]:
        if row["what"] == "jkv":
            ours, work = row["tokens_per_second"], (row["workload"], row["phase"])
        elif (row["workload"], row["phase"]) == work:
            theirs = row["tokens_per_second"]
            yield Line(", ".join(work), row["what"], ours, theirs, "tokens/s", False)


def read_beams(run: Run) -> Iterator[Line]:
    """Yield beam searches."""
    for row in run["rows"] if "beams" in run["benchmark"] else ():
        what = f"beam search, {row['prompts']} prompts, {row['beams']} beams"
        theirs = row["transformers tokens/s"]
        yield Line(what, "transformers", row["tokens/s"], theirs, "tokens/s", False)


def read_trainer(run: Run) -> Iterator[Line]:
    """Yield a rollout in a trainer."""
    medians = {row["engine"]: row["median"] for row in run["rollout"]["rows"]}
    for engine, median in medians.items():
        if engine != "jkv":
            what = "a rollout in google-tunix's trainer"
            yield Line(what, f"tunix, {engine}", medians["jkv"], median, "ms", True)


def read_gpu(run: Run) -> Iterator[Line]:
    """Yield attention on a GPU."""
    calls = [call for call in run["calls"] if {"contender", "median"} <= call.keys()]
    ours = {
        call["workload"]: call["median"] for call in calls if call["contender"] == "jkv"
    }
    for call in calls:
        if not call["contender"].startswith("jkv") and call["workload"] in ours:
            median, name = call["median"], call["workload"]
            what = f"attention, {name}"
            yield Line(what, call["contender"], ours[name], median, "us", True)


# Readers by results file.
READERS: dict[str, Callable[[Run], Iterator[Line]]] = {
    "operations": read_operations,
    "generate": read_generate,
    "rollouts": read_rollouts,
    "strategies": read_beams,
    "trainer": read_trainer,
    "gpu": read_gpu,
}


def read_runs(folder: pathlib.Path, name: str) -> list[Run]:
    """Return the newest run of each kind in a file; none if the file is missing."""
    path = folder / f"{name}.json"
    newest: dict[tuple[str, str], Run] = {}
    for run in json.loads(path.read_text())["runs"] if path.is_file() else []:
        if "earlier" in run.get("note", ""):
            continue
        kind = run["benchmark"], run.get("title", "")
        date = run["machine"]["date"]
        if kind not in newest or date > newest[kind]["machine"]["date"]:
            newest[kind] = run
    return [*newest.values()]


def make_table(folder: pathlib.Path) -> list[list[str]]:
    """Return the rows of the table, headings first."""
    rows = [["what", "beside", "jkv", "the other", "unit", "ratio", "where"]]
    for name, read in READERS.items():
        for run in read_runs(folder, name):
            machine = run["machine"]
            for line in read(run):
                numbers = [f"{n:,.0f}" if n >= 10 else f"{n:.2g}" for n in line[2:4]]
                where = f"{machine['device']}, {machine['date'][:10]}"
                ratio = f"{line.ratio:.2f}"
                rows.append([line.what, line.peer, *numbers, line.unit, ratio, where])
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    rows = make_table(parser.parse_args().results)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    main()
