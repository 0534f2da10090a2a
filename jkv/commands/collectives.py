"""Whether the devices can talk to each other: each collective, with a time-out.

Some pairs of cards never answer each other, and a collective that hangs cannot be
ended from within. So a child process tries them one after the other and says which is
done; one that has not answered in time is reported, and a new child tries the rest.
"""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.commands.report import Report

# More than compiling one takes; a collective itself takes milliseconds.
SECONDS = 60.0

AXIS = "all"

# What each brings on every rank, of a row [n] per rank, n ranks.
COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all-reduce": lambda row: jax.lax.psum(row, AXIS),
    "all-gather": lambda row: jax.lax.all_gather(row, AXIS).reshape(-1),
    "reduce-scatter": lambda row: jax.lax.psum_scatter(row, AXIS, tiled=True),
    "all-to-all": lambda row: jax.lax.all_to_all(row, AXIS, 0, 0, tiled=True),
    "collective-permute": lambda row: jax.lax.ppermute(row, AXIS, _ring()),
}


def check_collectives(report: Report) -> None:
    """Try each collective between all devices; say which works."""
    if jax.device_count() == 1:
        report.add("not checked", "collectives", "there is one device")
        return
    names = list(COLLECTIVES)
    while names:
        failure = _try_in_child(report, names)
        if failure is not None:
            report.add("FAILED", f"{names.pop(0)} between devices", failure)


def _try_in_child(report: Report, names: list[str]) -> str | None:
    """Try collectives in turn, taking those that work off the list.

    Returns:
      What is wrong with the first that is left; None if none is.
    """
    child = subprocess.Popen(
        make_command(names),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # This process has most of the memory of the cards.
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    answers: queue.Queue[str] = queue.Queue()
    errors: list[str] = []
    reader = _in_background(_read_lines, child.stdout, answers.put)
    collector = _in_background(_read_lines, child.stderr, errors.append)
    try:
        while names:
            start = time.monotonic()
            answer = answers.get(timeout=SECONDS).strip()
            if answer != names[0]:
                collector.join(timeout=1.0)
                said = [line.strip() for line in errors if line.strip()]
                return said[-1] if said else "its process ended"
            what = f"{names.pop(0)} between {jax.device_count()} devices"
            report.add("ok", what, f"{time.monotonic() - start:.1f} s")
    except queue.Empty:
        return f"no answer in {SECONDS:.0f} s: it hangs"
    finally:
        child.kill()
        # One that hangs in a driver may stay; it is not waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=2.0)
        reader.join(timeout=1.0)
        collector.join(timeout=1.0)
    return None


def _read_lines(stream: IO[str], take: Callable[[str], object]) -> None:
    """Pass on each line as it comes, and an empty one at the end."""
    with stream:
        for line in stream:
            take(line)
    take("")


def _in_background(function: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def make_command(names: list[str]) -> list[str]:
    """Return the command of a child that tries these."""
    return [sys.executable, "-m", "jkv.commands.collectives", *names]


def try_collective(name: str) -> None:
    """Run one on all devices and compare it with numpy.

    Raises:
      ValueError: if it brings something else.
    """
    count = jax.device_count()
    mesh = jax.make_mesh((count,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    rows = np.arange(count * count, dtype=np.float32).reshape(count, count)
    spec = jax.sharding.PartitionSpec(AXIS)
    found = jax.jit(
        jax.shard_map(
            lambda part: COLLECTIVES[name](part[0])[None],
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )(jnp.asarray(rows))
    total = rows.sum(axis=0)
    wanted = {
        "all-reduce": np.tile(total, (count, 1)),
        "all-gather": np.tile(rows.reshape(-1), (count, 1)),
        "reduce-scatter": total[:, None],
        "all-to-all": rows.T,
        "collective-permute": np.roll(rows, 1, axis=0),
    }
    if not np.array_equal(np.asarray(found), wanted[name]):
        raise ValueError(f"{name} brought wrong numbers")


def _ring() -> list[tuple[int, int]]:
    count = jax.device_count()
    return [(rank, (rank + 1) % count) for rank in range(count)]


if __name__ == "__main__":
    for each in sys.argv[1:]:
        try_collective(each)
        print(each, flush=True)
