"""The most important measurements of a GPU, in eight minutes.

`python benchmarks/gpu.py --brief` runs the parts below, each in its own process. All
parts compile concurrently first; then the device is passed from part to part in list
order. Correctness does not wait, since it is not timed. Each part has a time limit from
its turn on; rows are saved immediately, so that a stopped part keeps its results. The
rows of all parts are merged into one file, and a table at the end has a line per
figure.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).parent
TOTAL_SECONDS = 8 * 60.0
COMPILE_SECONDS = 150.0  # timing starts then, even if some parts still compile


class Part(NamedTuple):
    """A process that compiles, waits for its turn and is timed."""

    name: str
    arguments: tuple[str, ...]  # of the interpreter; the file of rows follows
    seconds: float  # limit from its turn on
    is_timed: bool = True
    flags: str = ""  # of XLA

    @property
    def file_name(self) -> str:
        """File name of its rows and output, without suffix."""
        return self.name.replace(", ", "-").replace(" ", "-")


def list_parts(quick: bool) -> list[Part]:
    """Return the parts, the most important first."""

    def script(name: str, *options: str, rows: str = "--json") -> tuple[str, ...]:
        return str(HERE / name), *options, rows

    quickly = ["--quick"] if quick else []

    def own(name: str) -> tuple[str, ...]:
        return script("gpu_brief.py", "--part", name, *quickly)

    def model(ways: str, batches: str, *options: str) -> tuple[str, ...]:
        sizes = ["--tiny"] if quick else []
        options = "--rounds", "1" if quick else "2", *options, *sizes
        weights = "--weights", "bfloat16", "--only", *batches.split()
        return script("gpu_model.py", *weights, "--ways", ways, *options, rows="--rows")

    small, large = ("1x32", "4x24") if quick else ("1x2048", "64x2048")
    both = f"{large} {small}"
    parts = [
        Part("correctness", script("gpu_correctness.py", *quickly), 150, False),
        # It loads its weights before its turn, so it must finish before the large ones
        # start.
        Part("engine, small", model("engine", small, "--warm"), 45),
        Part("generate", model("generate", both, "--profile"), 75),
        Part("bookkeeping", own("bookkeeping"), 30),
        Part("engine, large", model("engine", large), 150),
        Part("decode", own("decode"), 80),
        Part("prompts", own("prompts"), 45),
        Part("torch", model("torch, CUDA graph", both), 45),
        Part("gradients", own("gradients"), 40),
        Part(
            "generate, without command buffers",
            model("generate", both, "--profile"),
            50,
            flags="--xla_gpu_enable_command_buffer=",
        ),
    ]
    names = {"correctness", "decode", "generate"}  # of the quick form
    return [part for part in parts if not quick or part.name in names]


def run_brief(
    quick: bool,
    results: pathlib.Path,
    parts: Sequence[Part] | None = None,
    total: float = TOTAL_SECONDS,
    only: Sequence[str] = (),
) -> int:
    """Run the parts, save rows, print the table; return the number of failures.

    Args:
        quick: tiny shapes and few parts, for a CPU; saves only the rows.
        results: results file of all GPUs.
        parts: parts to run; None runs all.
        total: time limit in seconds.
        only: names of parts to run; empty runs all.
    """
    chosen = list_parts(quick) if parts is None else parts
    chosen = [part for part in chosen if not only or part.name in only]
    folder = HERE / "out" / "brief" if parts is None else results.parent / "brief"
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as turns:
        ended = {
            part.name: status
            for part, status in _run_side_by_side(
                chosen, folder, pathlib.Path(turns), began + total
            )
        }
    found = {part.name: _read_rows(folder, part) for part in chosen}
    print(show_summary(found), flush=True)
    for name, status in ended.items():
        print(f"{name}: {status}")
    print(f"{time.monotonic() - began:.0f} s in all")
    if not quick and parts is None:
        import harness

        name = ", ".join(["gpu_brief", *only])
        run = {"benchmark": name, "machine": harness.machine()}
        harness.save(results, run | {"ended": ended, "parts": found})
        print(f"saved in {results}")
    return sum(status != "done" for status in ended.values())


class _Running(NamedTuple):
    part: Part
    process: subprocess.Popen[bytes]
    turn: pathlib.Path

    @property
    def is_ready(self) -> bool:
        return pathlib.Path(f"{self.turn}.ready").exists()

    def hand_turn(self) -> None:
        pathlib.Path(f"{self.turn}.go").touch()

    def kill(self) -> None:
        """Kill the part and its child processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _run_side_by_side(
    parts: Sequence[Part], folder: pathlib.Path, turns: pathlib.Path, deadline: float
) -> Iterator[tuple[Part, str]]:
    """Yield each part with its outcome: done, failed, or out of time."""
    waiting = [_start(part, folder, turns) for part in parts]
    timed: tuple[_Running, float] | None = None  # the part with the turn, its end
    compile_deadline = time.monotonic() + COMPILE_SECONDS
    running_free: list[tuple[_Running, float]] = []
    try:
        while waiting or timed or running_free:
            now = time.monotonic()
            for each in [e for e in waiting if not e.part.is_timed and e.is_ready]:
                each.hand_turn()
                waiting.remove(each)
                running_free.append((each, now + each.part.seconds))
            for each in [e for e in waiting if e.process.poll() is not None]:
                waiting.remove(each)  # it failed before its turn
                yield each.part, _end(each, folder)
            for entry in list(running_free):
                if status := _poll(entry, now, deadline, folder):
                    running_free.remove(entry)
                    yield entry[0].part, status
            if timed and (status := _poll(timed, now, deadline, folder)):
                yield timed[0].part, status
                timed = None
            queue = [each for each in waiting if each.part.is_timed]
            ready = [each for each in queue if each.is_ready]
            settled = len(ready) == len(queue) and not running_free
            if not timed and ready and (settled or now > compile_deadline):
                timed = ready[0], now + ready[0].part.seconds
                waiting.remove(ready[0])
                print(
                    f"{now - compile_deadline + COMPILE_SECONDS:.0f} s: "
                    f"{ready[0].part.name} has the device",
                    flush=True,
                )
                ready[0].hand_turn()
            if now > deadline:
                for each in waiting:
                    each.kill()
            time.sleep(0.05)
    finally:
        left = [*waiting, *(each for each, _ in running_free)]
        for each in left + ([timed[0]] if timed else []):
            each.kill()


def _start(part: Part, folder: pathlib.Path, turns: pathlib.Path) -> _Running:
    rows, turn = folder / f"{part.file_name}.json", turns / part.file_name
    rows.unlink(missing_ok=True)
    command = [sys.executable, *part.arguments, str(rows)]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {part.flags}".strip()
    with (folder / f"{part.file_name}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "JKV_TURN": str(turn), "XLA_FLAGS": flags},
        )
    return _Running(part, process, turn)


def _poll(
    entry: tuple[_Running, float], now: float, deadline: float, folder: pathlib.Path
) -> str | None:
    """Return a part's outcome, None while it runs; stop it at its deadline."""
    each, end = entry
    if each.process.poll() is None:
        if now < min(end, deadline):
            return None
        each.kill()
        print(f"{each.part.name}: out of time", flush=True)
        return "out of time"
    return _end(each, folder)


def _end(each: _Running, folder: pathlib.Path) -> str:
    if each.process.returncode == 0:
        return "done"
    log = (folder / f"{each.part.file_name}.log").read_text()
    print(f"{each.part.name} failed:\n{log[-1500:]}", flush=True)
    return f"failed with {each.process.returncode}"


def _read_rows(folder: pathlib.Path, part: Part) -> list[dict[str, Any]]:
    path = folder / f"{part.file_name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def show_summary(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return a line per figure, by part."""
    lines = []
    for part, rows in found.items():
        lines.append(f"== {part}")
        if part == "correctness":
            wrong = [row for row in rows if "failed" in row]
            refused = [row for row in rows if "refused" in row]
            right = len(rows) - len(wrong) - len(refused)
            lines.append(f"{right} right, {len(wrong)} wrong, {len(refused)} refused")
            lines += [f"  {row}" for row in (*wrong, *refused)]
            continue
        for row in rows:
            shown = {k: v for k, v in row.items() if k in SHOWN}
            cells = (
                f"{k} {v:.4g}" if isinstance(v, float) else f"{v}"
                for k, v in shown.items()
            )
            lines.append("  " + "; ".join(cells))
            if "profile" in row:
                lines += _show_profile(row["profile"])
    return "\n".join(lines)


SHOWN = (
    *(
        "workload",
        "step",
        "sequences",
        "context",
        "what",
        "contender",
        "setting",
        "median",
    ),
    *("GB/s", "of a copy", "TFLOP/s", "ratio", "by jkv", "by torch", "tokens/s"),
    *("share", "us above the floor", "start", "kept", "refused"),
)


def _show_profile(rows: list[dict[str, Any]]) -> list[str]:
    from gpu_profile import sum_groups

    lines = [
        f"    {g['group']}: {g['launches']:.1f} launches, {g['us']:.1f} us"
        for g in sum_groups(rows)
    ]
    lines += [
        f"      {row['us']:.1f} us, {row['launches']:.1f} launches: {row['kernel']}"
        for row in rows[:25]
    ]
    return lines


def measure_part(name: str, quick: bool, rows: pathlib.Path) -> None:
    """Measure a part whose shapes are defined here."""
    import gpu_gradients
    import gpu_prompts
    import harness

    rounds = 2 if quick else 5
    measures: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "prompts": lambda: gpu_prompts.measure_prompts(quick, rounds),
        "gradients": lambda: gpu_gradients.measure_gradients(quick, rounds),
        "bookkeeping": lambda: _measure_bookkeeping(quick, rounds),
        "decode": lambda: _measure_decode(quick, rounds, rows),
    }
    harness.save_rows(rows, measures[name]())


def _measure_bookkeeping(quick: bool, rounds: int) -> list[dict[str, Any]]:
    import gpu

    return gpu.measure_step(*((2, 64) if quick else (64, 2_048)), rounds)


def _measure_decode(
    quick: bool, rounds: int, rows: pathlib.Path
) -> list[dict[str, Any]]:
    import warnings

    import gpu
    import harness
    from gpu_calls import Workload, compile_all

    short, long, count = (64, 256, 4) if quick else (2_048, 8_192, 64)
    some = (short,) * count
    unequal = tuple(round(long / 64 * 64 ** (i / (count - 1))) for i in range(count))
    workloads = [
        Workload(some),
        Workload((short,)),
        Workload((long,)),
        *(Workload((long,) * count, is_latent=True, dtype=d) for d in FORMATS),
        Workload(some, is_latent=True),
        *(Workload(some, dtype=dtype) for dtype in FORMATS[1:]),
        Workload(some, dtype="int8", value_dtype="int4"),
        *(Workload(unequal, dtype=dtype) for dtype in FORMATS),
        *(
            Workload((short,) * count, forks=min(8, count), reads_once=once)
            for once in (False, True)
        ),
        Workload((long,), is_prefill=True),
    ]
    if quick:
        workloads = [each._replace(calls=2) for each in workloads[:2]]
    own = [workloads[0], workloads[-1]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled = compile_all(gpu.find_programs(workloads, own))
    harness.wait_for_turn()
    copied = gpu.copy_bandwidth(2**24 if quick else 2**31, rounds)
    head = [{"what": "copy", "GB/s": copied / 1e9}]

    def save(found: list[dict[str, Any]]) -> None:
        harness.save_rows(rows, head + found)

    return head + gpu.measure_calls(workloads, compiled, rounds, copied, save=save)


FORMATS = "bfloat16", "int8", "fp8"


def main() -> None:
    """Run one part as a process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    options = parser.parse_args()
    measure_part(options.part, options.quick, options.json)


if __name__ == "__main__":
    main()
