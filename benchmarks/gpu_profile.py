"""Device time of a program by kernel name, from `jax.profiler`."""

import collections
import glob
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

# The first pattern that a kernel's name contains gives its group.
GROUPS = {
    "attention": r"jkv_",
    "products": r"gemm|gemv|nvjet|cutlass|xmma|cublas|dot|splitK|__triton_gemm",
    "copies": r"[Mm]emcpy|copy|[Mm]emset",
    "sampling": r"sort|reduce|argmax|topk|select_k",
    "scatters": r"scatter",
    "fusions": r"fusion",
}


class Profile(NamedTuple):
    """Kernels of a profiled run."""

    counts: collections.Counter[str]  # launches by kernel name
    seconds: collections.Counter[str]  # device time by kernel name
    span: float  # seconds from the first launch's start to the last one's end


def profile(run: Callable[[], Any]) -> Profile:
    """Run a compiled program under the profiler; return its kernels.

    Without a GPU the operations of the CPU client stand in for kernels.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        return read_events(list_events(jax.profiler.ProfileData.from_file(path)))


def list_events(data: Any) -> Iterable[tuple[str, float, float]]:
    """Yield name, start and duration in nanoseconds of each kernel."""
    planes = list(data.planes)
    on_gpu = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in on_gpu or planes:
        for line in plane.lines:
            if on_gpu and not line.name.startswith("Stream"):
                continue  # lines that sum up the streams
            for event in line.events:
                if on_gpu or re.fullmatch(r"[a-z][\w.-]*", event.name):
                    yield event.name, event.start_ns, event.duration_ns


def read_events(events: Iterable[tuple[str, float, float]]) -> Profile:
    """Add up events by name."""
    counts: collections.Counter[str] = collections.Counter()
    seconds: collections.Counter[str] = collections.Counter()
    starts, ends = [], []
    for name, start, duration in events:
        counts[name] += 1
        seconds[name] += duration / 1e9
        starts.append(start)
        ends.append(start + duration)
    span = (max(ends) - min(starts)) / 1e9 if starts else 0.0
    return Profile(counts, seconds, span)


def subtract(many: Profile, few: Profile, steps: int) -> list[dict[str, Any]]:
    """Return a row per kernel name: launches and microseconds of one step.

    Args:
      many: profile of a run with `steps` more steps than the other.
      few: profile of the other run.
      steps: difference in steps.

    Returns:
      Rows sorted by time, the most expensive first; the last row, "idle", is the time
      of a step in which no kernel ran.
    """
    rows = []
    for name in many.counts:
        count = (many.counts[name] - few.counts[name]) / steps
        taken = (many.seconds[name] - few.seconds[name]) / steps * 1e6
        if count > 0:
            rows.append(
                {"kernel": name, "group": find_group(name), "launches": count}
                | {"us": taken}
            )
    rows.sort(key=lambda row: -row["us"])
    busy = sum(row["us"] for row in rows)
    span = (many.span - few.span) / steps * 1e6
    idle = {"kernel": "idle", "group": "idle", "launches": 0.0, "us": span - busy}
    return [*rows, idle]


def sum_groups(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add up the rows of `subtract` by group."""
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        group = groups.setdefault(
            row["group"], {"group": row["group"], "launches": 0.0, "us": 0.0}
        )
        group["launches"] += row["launches"]
        group["us"] += row["us"]
    return sorted(groups.values(), key=lambda group: -group["us"])


def find_group(name: str) -> str:
    """Return the group of a kernel by its name."""
    for group, pattern in GROUPS.items():
        if re.search(pattern, name):
            return group
    return "other"
