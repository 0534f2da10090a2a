"""All GPU benchmarks, in parts of at most eight minutes.

`python benchmarks/gpu.py --all` runs the parts in order, each in a process of its own
that saves its results as it runs. Finished parts are recorded in a file, so that the
same command resumes; a part that failed or timed out is then repeated, and does not
block the others.
"""

import json
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
NOTES = HERE / "out" / "gpu_all.json"
LIMIT = 8 * 60  # seconds
BATCHES = "1x2048", "1x8192", "8x8192", "64x2048", "256x512"  # of gpu_model.py
KERNEL_TESTS = (
    "test_pallas.py",
    "test_kernel_derivative.py",
    "test_kernel_by_position.py",
    "test_kernel_slots.py",
    "test_kernel_rounding.py",
)


class Part(NamedTuple):
    """A benchmark command."""

    name: str
    arguments: tuple[str, ...]  # of the interpreter


def list_parts() -> list[Part]:
    """Return the parts: correctness first, then user-visible performance."""
    tests = HERE.parent / "tests" / "attention" / "kernel"
    report, light = (HERE / "out" / f"{name}.json" for name in ("doctor", "light"))
    timed = HERE / "out" / "tiles_float32.json"
    tiles = str(HERE / "tiles.py"), "--json", str(timed)
    parts = [
        Part(
            "first light", ("-m", "jkv.doctor", "--first-light", "--report", str(light))
        ),
        Part("doctor", ("-m", "jkv.doctor", "--report", str(report))),
        Part("launches", (str(HERE / "launches.py"),)),
        *(
            Part(name, ("-m", "pytest", "-q", str(tests / name)))
            for name in KERNEL_TESTS
        ),
        Part("attention", (str(HERE / "gpu.py"), "--minutes", "6")),
        Part("derivative", (str(HERE / "gpu.py"), "--gradients")),
        Part("prompts", (str(HERE / "gpu.py"), "--prompts")),
        # Includes float32 products as on RDNA.
        Part("tiles of float32", (*tiles, "--only", "float32", "prefill float32")),
    ]
    for weights in ("bfloat16", "int8"):
        for batch in BATCHES:
            options = "--weights", weights, "--only", batch
            name = f"model, {weights}, {batch}"
            parts.append(Part(name, (str(HERE / "gpu_model.py"), *options)))
    return [*parts, Part("exact", (str(HERE / "exact.py"),))]


def run_parts(
    parts: list[Part], notes: pathlib.Path = NOTES, limit: float = LIMIT
) -> int:
    """Run the unfinished parts; return the number of failures.

    Args:
      parts: in order.
      notes: file with the status of each part.
      limit: seconds per part.
    """
    notes.parent.mkdir(parents=True, exist_ok=True)
    ended = json.loads(notes.read_text()) if notes.exists() else {}
    failed = 0
    for number, part in enumerate(parts, 1):
        title = f"{part.name} ({number} of {len(parts)})"
        if ended.get(part.name, {}).get("status") == 0:
            print(f"{title}: was done before", flush=True)
            continue
        print(f"{title}, at most {limit / 60:.0f} minutes", flush=True)
        began = time.monotonic()
        try:
            command = [sys.executable, *part.arguments]
            status = subprocess.run(command, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            status = -1  # results saved so far are kept
        failed += status != 0
        seconds = round(time.monotonic() - began, 1)
        ended[part.name] = {"status": status, "seconds": seconds}
        notes.write_text(json.dumps(ended, indent=1) + "\n")
        how = {0: "done", -1: "took too long"}.get(status, f"failed with {status}")
        print(f"{title}: {how} after {seconds} s", flush=True)
    print(f"{len(parts) - failed} of {len(parts)} parts are done; notes in {notes}")
    return failed
