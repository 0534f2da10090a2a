"""Soak test of multi-turn rollouts under weight updates: no leaks, no stale blocks.

    python benchmarks/long_runs.py [--rollouts 2000]

Rollouts are parked between turns, cancelled and abandoned while the weights change in
each way of `Engine.update_params`. The model writes its weights' version into each key,
and each token encodes the oldest version that it attended to and a hash of its
sequence: every token is checked, so a stale block or a lost token ends the run. Process
memory, live arrays and their bytes, and compiled programs are compared after a tenth of
the rollouts and at the end.
"""

import argparse
import dataclasses
import gc
import pathlib
import sys
import time

import harness
import jax
import jax.monitoring
import numpy as np

import jkv

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.models.versioned_model import make_engine  # noqa: E402, likewise
from support.serving.long_runs import Clock, Game  # noqa: E402, as in the test

RESULTS = ROOT / "benchmarks" / "results" / "long_runs.json"
MOST_GROWTH = 16 * 2**20  # bytes; allocator noise
COMPILED = []


def note_compiled(event, _seconds, **_kwargs):
    """Count compilations by XLA."""
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(event)


def resident_bytes():
    """Return the resident memory of this process; 0 if unavailable."""
    status = pathlib.Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


def look(game, engine):
    """Return the progress, and the quantities that must not grow."""
    # Run a window first, so that no exchanged results are unread.
    engine.generate([[1]], max_new_tokens=1)
    gc.collect()
    arrays = jax.live_arrays()
    return {
        "rollouts": game.counts.rollouts,
        "updates": game.counts.updates,
        "bytes of the process": resident_bytes(),
        "live arrays": len(arrays),
        "bytes of live arrays": sum(array.nbytes for array in arrays),
        "programs compiled": len(COMPILED),
        "free blocks": int(jkv.num_free_blocks(engine.cache)),
        "parked bytes": engine.stats().parked_bytes,
    }


def main():
    """Run the rollouts and compare memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=2000)
    count = parser.parse_args().rollouts
    jax.monitoring.register_event_duration_secs_listener(note_compiled)
    clock, started = Clock(), time.perf_counter()
    options = dict(park_seconds=6.0, max_parked_bytes=4000, checks=False)
    engine = make_engine(clock=clock, max_results=100, **options)
    game = Game(engine, clock, np.random.default_rng(0))
    rows = []
    for part in (count // 10, count - count // 10):
        game.play(part)
        rows.append(look(game, engine))
    jkv.check(engine.cache)
    stats, where = engine.stats(), harness.machine()
    counts = dataclasses.asdict(game.counts) | {
        "preemptions": stats.preemptions,
        "cached_tokens": stats.cached_tokens,
        "recomputed_tokens": stats.recomputed_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "windows": stats.num_windows,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(harness.header("Long runs", where))
    print(harness.table(rows, {name: name for name in rows[0]}))
    print(", ".join(f"{name} {value}" for name, value in counts.items()))
    before, after = rows
    for name in ("live arrays", "bytes of live arrays", "programs compiled"):
        assert after[name] == before[name], f"{name} grew"
    assert after["free blocks"] == 24 and after["parked bytes"] == stats.failed == 0
    grown = after["bytes of the process"] - before["bytes of the process"]
    assert grown < MOST_GROWTH, f"the process has grown by {grown} bytes"
    run = {"benchmark": "long_runs", "machine": where, "counts": counts, "rows": rows}
    harness.save(RESULTS, run)


if __name__ == "__main__":
    main()
