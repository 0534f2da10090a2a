"""What share of an MI300X's bandwidth decoding reaches, by a model of machine code.

    python benchmarks/kernel_model.py

No card is needed, and none was asked: the decode kernel is compiled for gfx942, a walk
over its loop (`tests/instruction_walk.py`) gives the cycles of a step, and the lists of
work are those that the kernel would be given. Three bounds are taken, and the largest
is the estimate:

* memory: the bytes of the contexts over the card's bandwidth;
* latency: the steps that one program does after another, each as long as the walk says,
  times the turns in which all programs find room;
* issue: the cycles in which instructions are issued, spread evenly over all SIMDs.

Needs what `make machine-code` installs. The model knows nothing of caches, of the join,
of a launch's own time, or of programs that disturb each other: it is for comparing a
change with what was there before, until somebody times a card.
"""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any, NamedTuple

import harness
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from instruction_walk import walk  # noqa: E402, what the tests assert, too
from kernel_lowering import find_kernels, lower_kernels, make_shapes  # noqa: E402
from machine_code import attention_loop, compile_kernel  # noqa: E402

from jkv.attention.call import make_requests  # noqa: E402
from jkv.attention.kernel.tuning import Tuning, find_tuning  # noqa: E402
from jkv.attention.kernel.work import (  # noqa: E402
    list_decode_work,
    size_decode_work,
)

RESULTS = pathlib.Path(__file__).parent / "results" / "kernel_model.json"
TARGET = "gfx942"
# MI300X, from AMD's data sheet and the CDNA 3 ISA guide; a wave of 64 lanes has 512
# registers on a SIMD for all that share it, in steps of 8.
UNITS, SIMDS, REGISTERS, CLOCK, BANDWIDTH = 304, 4, 512, 2.1e9, 5.3e12
LATENCIES = (700, 900, 1200)  # nanoseconds to the card's memory under load
HEAD_DIM, KV_HEADS, GROUP, BLOCK_SIZE = 128, 8, 4, 16
# Sequences and tokens of each, as `benchmarks/gpu.py` times them.
CALLS = ((1, 2_048), (1, 8_192), (1, 131_072), (8, 1_024), (64, 1_024), (64, 8_192))
ELEMENTS = ("bfloat16", "int8", "float8_e4m3fn")


class Compiled(NamedTuple):
    """The decode kernel, compiled."""

    tuning: Tuning
    loop: list[str]
    registers: int
    step_bytes: int  # of keys and values that a step reads


def compile_decode(elements: str, **changes: Any) -> Compiled:
    """Compile the kernel for a pool of these elements, the tile changed perhaps."""
    kv_dtype = None if elements == "bfloat16" else elements
    queries, pools = make_shapes(
        HEAD_DIM,
        group=GROUP,
        kv_heads=KV_HEADS,
        block_size=BLOCK_SIZE,
        kv_dtype=kv_dtype,
    )
    found = find_tuning(queries, pools, "rocm", TARGET)
    assert found is not None
    decode = dataclasses.replace(found.decode, **changes)
    tuning = dataclasses.replace(found, decode=decode)
    lowered = lower_kernels(queries, pools, tuning, "rocm", max_query_length=1)
    (kernel,) = (k for k in find_kernels(lowered) if k.name == "jkv_decode")
    code = compile_kernel(kernel, TARGET)
    element_bytes = jnp.dtype(pools.keys.dtype).itemsize
    return Compiled(
        tuning=tuning,
        loop=attention_loop(kernel, TARGET),
        registers=code.registers,
        step_bytes=2 * decode.tokens * HEAD_DIM * element_bytes,
    )


def count_steps(compiled: Compiled, batch: int, context: int) -> np.ndarray:
    """Return the steps of each program of a call that has any, i32[...]."""
    wanted = -(-compiled.tuning.programs // KV_HEADS)
    sizes = size_decode_work(batch, batch, context, wanted)
    requests = make_requests(
        jnp.zeros((batch, -(-context // BLOCK_SIZE)), jnp.int32),
        None,
        jnp.arange(batch, dtype=jnp.int32),
        jnp.ones(batch, jnp.int32),
        jnp.full(batch, context, jnp.int32),
        num_rows=batch,
        block_size=BLOCK_SIZE,
        max_query_length=1,
    )
    work = list_decode_work(requests, None, sizes).work
    tokens = np.asarray(work.end - work.first)
    return -(-tokens[tokens > 0] // compiled.tuning.decode.tokens)


def estimate(
    compiled: Compiled, batch: int, context: int, latency: int
) -> dict[str, float]:
    """Return the three bounds in microseconds, and the share of the bandwidth."""
    steps = count_steps(compiled, batch, context)
    warps = compiled.tuning.decode.num_warps
    step = walk(compiled.loop, round(latency * CLOCK / 1e9))
    rounded = -(-compiled.registers // 8) * 8
    resident = UNITS * SIMDS * (REGISTERS // rounded) // warps
    turns = -(-len(steps) * KV_HEADS // resident)
    num_steps = int(steps.sum()) * KV_HEADS
    seconds = {
        "memory": num_steps * compiled.step_bytes / BANDWIDTH,
        "latency": turns * int(steps.max()) * step.cycles / CLOCK,
        "issue": num_steps * warps * step.issue_cycles / (UNITS * SIMDS) / CLOCK,
    }
    share = seconds["memory"] / max(seconds.values())
    return {name: value * 1e6 for name, value in seconds.items()} | {"share": share}


def main() -> None:
    """Print the estimates, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one call, nothing kept")
    options = parser.parse_args()
    where = harness.machine() | {"target": TARGET}
    print(harness.header("jkv: the decode kernel on MI300X, a model", where))
    rows = []
    for elements in ELEMENTS[:1] if options.quick else ELEMENTS:
        for is_carried in (False, True):
            compiled = compile_decode(elements, is_carried=is_carried)
            for batch, context in CALLS[:1] if options.quick else CALLS:
                row: dict[str, Any] = {
                    "elements": elements,
                    "next tile carried": is_carried,
                    "call": f"{batch} x {context}",
                    "programs": len(count_steps(compiled, batch, context)) * KV_HEADS,
                }
                for latency in LATENCIES:
                    found = estimate(compiled, batch, context, latency)
                    row |= {k: round(found[k], 2) for k in ("memory", "issue")}
                    row[f"latency, {latency} ns"] = round(found["latency"], 2)
                    row[f"share, {latency} ns"] = round(found["share"], 3)
                rows.append(row)
    print(harness.table(rows, {key: key for key in rows[0]}))
    if not options.quick:
        run = {"benchmark": "kernel_model", "machine": where, "unit": "us"}
        harness.save(RESULTS, run | {"rows": rows})
        print(f"\nwritten to {RESULTS.name}")


if __name__ == "__main__":
    main()
