"""Host overhead of multi-process engines: two independent ones and a shared one.

    python benchmarks/processes.py [--windows 300] [--running 64]

Windows of a model without layers are started and read, so that only host work remains.
Its time is the stepping thread's CPU time, without waiting (`time.thread_time`). Two
processes on one machine slow each other down in any case, so the baseline is two
processes with an engine each, running at the same time; a single process is shown too.
Broadcasts and their bytes are counted. The target is at most 5% overhead for a shared
engine.
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import harness
import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.serving import Engine
from jkv.serving.device import orders

RESULTS = pathlib.Path(__file__).parent / "results" / "processes.json"
VOCABULARY, CONTEXT = 64, 4096
FOUND = re.compile(r"found (\S+) (\S+) (\S+)")


def count_on(_params, tokens, cache, batch):
    """Return logits of the next number; there are no layers."""
    rows = tokens.at[batch.last_rows].get(mode="clip")
    return 8 * jax.nn.one_hot((rows + 1) % VOCABULARY, VOCABULARY), cache


def make_engine(mesh, num_running):
    """Return an engine for `num_running` sequences, on a mesh or in this process."""
    config = jkv.CacheConfig(
        num_layers=1,
        num_kv_heads=2,
        head_dim=8,
        num_blocks=num_running * CONTEXT // 16,
        block_size=16,
        max_sequences=num_running,
        max_context_length=CONTEXT,
        dtype="float32",
    )
    where = {} if mesh is None else dict(mesh=mesh, heads="tp")
    return Engine(
        count_on,
        jnp.zeros((1,), jnp.float32),
        jkv.init(config, **where),
        max_running=num_running,
        max_new_tokens=CONTEXT - 8,
        max_prompt_tokens=8,
        num_ahead=0,
        num_steps=8,
        row_counts=(num_running,),
    )


def measure(engine, num_windows, num_running):
    """Return host microseconds per window while all sequences run."""
    for number in range(num_running):
        engine.submit([number % VOCABULARY])
    samples = []
    for number in range(num_windows + 20):
        began = time.thread_time()
        events = engine.step()
        if number >= 20:
            assert len(events) == num_running
            samples.append((time.thread_time() - began) * 1e6)
    engine.close()
    return samples


def run_beside(process, options):
    """Measure as one of two processes with an engine each."""
    jax.config.update("jax_platforms", "cpu")
    engine = make_engine(None, options.running)
    engine.warm_up()
    while process:  # until killed
        measure(engine, options.windows, options.running)
    time.sleep(3)  # until the other process is ready
    samples = measure(engine, options.windows, options.running)
    print("found", statistics.median(samples), 0, 0, flush=True)


def run_shared(process, port, options):
    """Measure as one of two processes that share an engine."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    sent = []
    send = orders.Broadcast.start

    def start(self, array):
        sent.append(array.nbytes)
        return send(self, array)

    orders.Broadcast.start = start
    mesh = jax.sharding.Mesh(
        np.asarray(jax.devices()), ("tp",), (jax.sharding.AxisType.Auto,)
    )
    engine = make_engine(mesh, options.running)
    if process:
        engine.follow()
        return
    engine.warm_up()
    sent.clear()
    samples = measure(engine, options.windows, options.running)
    windows = options.windows + 20
    median = statistics.median(samples)
    print("found", median, len(sent) / windows, sum(sent) / windows, flush=True)


def run_pair(options, port):
    """Run both processes; return microseconds, broadcasts and bytes per window.

    Without a port each has its own engine.
    """
    command = [sys.executable, __file__, f"--windows={options.windows}"]
    command.append(f"--running={options.running}")
    if port is not None:
        command.append(f"--port={port}")
    pair = [
        subprocess.Popen(
            [*command, f"--process={i}"], stdout=subprocess.PIPE, text=True
        )
        for i in (0, 1)
    ]
    try:
        output, _ = pair[0].communicate(timeout=900)
        return tuple(map(float, FOUND.search(output).groups()))
    finally:
        for process in pair:
            process.kill()
            process.communicate()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--windows", type=int, default=300, help="that are timed; %(default)s")
    add("--running", type=int, default=64, help="running sequences; %(default)s")
    add("--rounds", type=int, default=5, help="of both, in turn; %(default)s")
    add("--save", action="store_true", help=f"the rows, in {RESULTS.name}")
    add("--port", type=int, help=argparse.SUPPRESS)
    add("--process", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is not None:
        if options.port is None:
            run_beside(options.process, options)
        else:
            run_shared(options.process, options.port, options)
        sys.stdout.flush()
        os._exit(0)  # skips the final barrier; both are finished
    rows = []
    for number in range(options.rounds):
        engine = make_engine(None, options.running)
        engine.warm_up()
        alone = statistics.median(measure(engine, options.windows, options.running))
        beside, _, _ = run_pair(options, None)
        shared, sent, nbytes = run_pair(options, harness.find_port())
        rows.append(
            {
                "alone, us": round(alone, 1),
                "beside another engine, us": round(beside, 1),
                "shared, us": round(shared, 1),
                "more than beside, %": round(100 * (shared / beside - 1), 1),
                "orders a window": round(sent, 3),
                "bytes a window": round(nbytes),
            }
        )
        harness.progress(f"round {number + 1}: {rows[-1]}")
    where = harness.machine()
    print(harness.header(__doc__.splitlines()[0], where))
    print(harness.table(rows, {name: name for name in rows[0]}))
    if options.save:
        harness.save(
            RESULTS, {"benchmark": "processes", "machine": where, "rows": rows}
        )


if __name__ == "__main__":
    main()
