"""Compile a model's step with XLA's TPU compiler, without a TPU.

libtpu compiles for a described topology, so the compiled module can be checked as for
AMD GPUs (`rocm_compile.py`): temporary memory, in-place update of every cache array,
and collectives. Nothing runs or is timed.

    pip install "jax[tpu]"
    python benchmarks/tpu_compile.py
"""

import dataclasses
import json
import math
import os
import pathlib
import re
import time
from typing import Any

# libtpu queries these at load time; they have no source outside Google Cloud.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from rocm_compile import COLLECTIVE, LLAMA, Step  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "results" / "tpu_compile.json"
TOPOLOGY = "v5e:2x4"

# Shapes of Llama 3 8B, with 8 GiB of cache: a chip has 16.
BASE = dataclasses.replace(LLAMA, name="llama-8b", num_blocks=4096)
LONG_BLOCKS = dataclasses.replace(BASE, num_blocks=1024, block_size=128, dtype="int8")
STEPS = [
    BASE,
    dataclasses.replace(BASE, name="unrolled", num_layers=8, is_scanned=False),
    dataclasses.replace(BASE, name="float32", num_layers=4, dtype="float32"),
    dataclasses.replace(BASE, name="windows", window=1024),
    dataclasses.replace(BASE, name="5 rows each", num_rows=5 * 64),
    dataclasses.replace(BASE, name="chunks", num_rows=2048),
    dataclasses.replace(BASE, name="two sequences", num_sequences=2),
    dataclasses.replace(BASE, name="int8", dtype="int8"),
    dataclasses.replace(LONG_BLOCKS, name="int8, long blocks"),
    dataclasses.replace(LONG_BLOCKS, name="fp8, long blocks", dtype="float8_e4m3fn"),
    dataclasses.replace(BASE, name="head dim 64", num_layers=8, head_dim=64),
    dataclasses.replace(BASE, name="head dim 256", num_layers=8, head_dim=256),
    dataclasses.replace(
        BASE,
        name="latent, 128 heads",
        num_layers=8,
        num_heads=128,
        num_kv_heads=1,
        head_dim=576,
        latent_value_dim=512,
    ),
    dataclasses.replace(BASE, name="heads on 8 chips", heads=8, num_blocks=32768),
    dataclasses.replace(
        BASE,
        name="blocks on 8 chips",
        context=8,
        num_sequences=16,
        max_context_length=131072,
    ),
]


def compile_step(step: Step, devices: list[jax.Device]) -> dict[str, Any]:
    """Compile a step, and return figures of its module."""
    lowered, cache = step.lower(devices)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    arrays = cache.storage[0].arrays.values()
    storage_bytes = sum(x.size * x.dtype.itemsize for x in arrays) // step.num_cards
    return {
        "step": step.name,
        "layers": step.num_layers,
        "dtype": step.dtype,
        "head dim": step.head_dim,
        "block size": step.block_size,
        "chips": step.num_cards,
        "pool bytes": storage_bytes,
        "temporary bytes": memory.temp_size_in_bytes,
        "aliased bytes": memory.alias_size_in_bytes,
        "copies of a layer or more": count_copies(text, step, arrays),
        "collectives": sorted(
            f"{name} {re.sub('{.*?}', '', kind)}"
            for kind, name in COLLECTIVE.findall(text)
        ),
        "seconds to compile": round(seconds, 1),
    }


def count_copies(text: str, step: Step, arrays: Any) -> int:
    """Count the copies of at least a layer of an array, in the loop and around it."""
    layer_elements = min(array.size for array in arrays) // step.num_layers
    sizes = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text)
    elements = [math.prod(map(int, size.split(","))) for size in sizes]
    return sum(each >= layer_elements // step.num_cards for each in elements)


def main() -> None:
    described = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY)
    print(f"JAX {jax.__version__}, {described.devices[0].device_kind}, nothing runs")
    results = []
    for step in STEPS:
        results.append(compile_step(step, described.devices))
        print(json.dumps(results[-1]), flush=True)
    run = {"jax": jax.__version__, "target": TOPOLOGY, "steps": results}
    RESULTS.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
