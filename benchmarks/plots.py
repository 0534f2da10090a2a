"""Plot the figures of docs/measured.md from benchmarks/results.

    python benchmarks/plots.py [--folder docs/measured]

Each figure records a digest of its results, by which a test detects outdated ones.
"""

import argparse
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes

RESULTS = pathlib.Path(__file__).parent / "results"
FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "measured"

OURS, THEIRS = "#3f6fb5", "#b9b9b9"

POOL = 65_536  # the larger pool of operations.py

Run = dict[str, Any]


def find_newest_run(name: str) -> Run:
    """Return the latest run of a benchmark, without runs of earlier versions."""
    runs = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    valid = [run for run in runs if "earlier" not in run.get("note", "")]
    return max(valid, key=lambda run: run["machine"]["date"])


def digest(name: str) -> str:
    """Return a digest of the results."""
    return hashlib.sha256((RESULTS / f"{name}.json").read_bytes()).hexdigest()[:16]


def format_number(value: float) -> str:
    """Format a number with about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw_bars(axes: Axes, names: Sequence[str], values: Sequence[float]) -> None:
    """Draw a labelled bar for each name, jkv's in its own colour."""
    colours = [OURS if name.startswith("jkv") else THEIRS for name in names]
    bars = axes.barh(names, values, color=colours)
    axes.bar_label(bars, fmt=format_number, padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def draw_operations(run: Run) -> None:
    """Plot the time of a call of each contender."""
    figure, all_axes = pyplot.subplots(3, 1, figsize=(7.5, 8), layout="constrained")
    for axes, operation in zip(all_axes, ("append", "free", "fork"), strict=True):
        rows = [
            row
            for row in run["rows"]
            if row["operation"] == operation
            and row["pool"] == POOL
            and row.get("storage", "metadata only") == "metadata only"
        ]
        draw_bars(axes, [r["contender"] for r in rows], [r["median"] for r in rows])
        axes.set_xscale("log")
        axes.set_title(f"{operation}, {POOL:,} blocks: microseconds", fontsize=9)


def draw_attention(run: Run) -> None:
    """Plot paged and dense attention."""
    figure, axes = pyplot.subplots(figsize=(7.5, 6), layout="constrained")
    names, values = [], []
    for row in run["rows"]:
        names += [f"jkv: {row['workload']}", f"dense: {row['workload']}"]
        values += [row["median"], row["dense"]]
    draw_bars(axes, names, values)
    axes.set_title("attention of a step, two CPU cores: ms", fontsize=9)


def draw_reuse(run: Run) -> None:
    """Plot the time to first token with and without prefix caching."""
    figure, axes = pyplot.subplots(figsize=(7.5, 2.2), layout="constrained")
    rows = run["first token"]
    draw_bars(axes, [r["contender"] for r in rows], [r["median"] for r in rows])
    axes.set_title("first token of a prompt of 1,024 tokens: ms", fontsize=9)


def draw_accuracy(run: Run) -> None:
    """Plot the error of each cache dtype."""
    figure, axes = pyplot.subplots(figsize=(7.5, 2.2), layout="constrained")
    rows = run["attention"]
    values = [100 * r["error, normal"] for r in rows]
    draw_bars(axes, [f"jkv: {r['cache']}" for r in rows], values)
    axes.set_title("error of attention over 1,000 tokens: %", fontsize=9)


def draw_generate(run: Run) -> None:
    """Plot tokens per second of whole generations."""
    figure, all_axes = pyplot.subplots(2, 1, figsize=(7.5, 5), layout="constrained")
    for axes, phase in zip(all_axes, ("prefill", "decode"), strict=True):
        rows = [row for row in run["rows"] if row["phase"] == phase]
        names = [f"{row['what']}: {row['workload']}" for row in rows]
        draw_bars(axes, names, [row["tokens_per_second"] for row in rows])
        axes.set_title(f"{phase}: tokens a second", fontsize=9)


def draw_compile(run: Run) -> None:
    """Plot the compilation time of a decode step."""
    figure, axes = pyplot.subplots(figsize=(7.5, 2.4), layout="constrained")
    rows = run["rows"]
    names = [f"{row['cache']}, {row['layers']} layers" for row in rows]
    draw_bars(axes, names, [row["all"] for row in rows])
    axes.set_title("trace, lower and compile: s of processor time", fontsize=9)


def draw_gpu(run: Run) -> None:
    """Plot decode bandwidth relative to a copy on a GPU, one point per batch."""
    figure, axes = pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")
    peers = {
        "jkv": ("jkv: bfloat16, paged", OURS),
        "jax.experimental paged_attention": ("jax.experimental: paged", "#d98b3a"),
        "torch scaled_dot_product_attention": ("torch: contiguous", THEIRS),
    }
    usual = [r for r in run["calls"] if r["workload"].endswith(", bfloat16")]
    for contender, (label, colour) in peers.items():
        points = sorted(
            (row["bytes"] / 1e6, row["of a copy"])
            for row in usual
            if row["contender"] == contender and "of a copy" in row
        )
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
    axes.set_xscale("log")
    axes.set_ylim(0)
    axes.set_title(
        "decoding: bandwidth, of a copy's; by MB of keys and values", fontsize=9
    )
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)


def draw_trainer(run: Run) -> None:
    """Plot training rewards of each engine, one line per seed, and a rollout."""
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(7.5, 4.6), layout="constrained", height_ratios=(3, 1)
    )
    for engine, colour in (("vanilla", THEIRS), ("jkv", OURS)):
        curves = [c["rewards"] for c in run["curves"] if c["engine"] == engine]
        for number, rewards in enumerate(curves):
            label = f"{engine}, {len(curves)} seeds" if number == 0 else None
            above.plot(range(1, len(rewards) + 1), rewards, color=colour, label=label)
    above.set_title("reward of a step of GRPO", fontsize=9)
    above.tick_params(labelsize=8)
    above.spines[["top", "right"]].set_visible(False)
    above.legend(fontsize=8, frameon=False)
    rows = run["rollout"]["rows"]
    draw_bars(below, [r["engine"] for r in rows], [r["median"] for r in rows])
    below.set_title("a rollout of 8 prompts, 8 answers each: ms", fontsize=9)


PICTURES: dict[str, Callable[[Run], None]] = {
    "operations": draw_operations,
    "attention": draw_attention,
    "reuse": draw_reuse,
    "accuracy": draw_accuracy,
    "generate": draw_generate,
    "compile": draw_compile,
    "trainer": draw_trainer,
    "gpu": draw_gpu,
}


def draw_all(folder: pathlib.Path) -> None:
    """Plot all figures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pyplot.switch_backend("agg")
    settings = {"svg.hashsalt": "jkv", "svg.fonttype": "none"}
    for name, draw in PICTURES.items():
        run = find_newest_run(name)
        with pyplot.rc_context(settings):
            draw(run)
            machine = run["machine"]
            is_cpu = machine["platform"] == "cpu"
            where = machine["cpu" if is_cpu else "device"]
            shown = (machine["versions"]["jax"], where, machine["date"][:10])
            pyplot.gcf().supxlabel("JAX " + ", ".join(shown), fontsize=7)
            noted = {"Date": None, "Description": f"results {digest(name)}"}
            pyplot.savefig(folder / f"{name}.svg", metadata=noted)
            pyplot.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER)
    draw_all(parser.parse_args().folder)


if __name__ == "__main__":
    main()
