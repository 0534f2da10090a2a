"""python -m jkv.doctor: what works on this machine, and how fast.

For whoever has a card that jkv's developers have not: it prints what is installed,
names combinations known to be bad, runs the bookkeeping and the attention on the
device against their specifications, measures how much of the memory's bandwidth a copy
and a decode step reach, and writes all of it to a file to attach to a report. On a CPU
it checks what can be checked there and says what could not be.

The exit status is 0 if nothing is wrong, 1 if a check failed.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attention import paged_attention
from jkv.config.cache_config import CacheConfig
from jkv.config.dtypes import STORAGE_DTYPES, needs_scales
from jkv.inspection.invariants import check
from jkv.state import Cache
from jkv.status import InvariantError
from jkv.storage import quantization
from jkv.verbs.allocation import allocate, free
from jkv.verbs.appending import append
from jkv.verbs.forking import fork
from jkv.verbs.initialization import init
from jkv.verbs.lookups import num_free_blocks
from jkv.verbs.truncation import truncate
from jkv.verbs.writing import write

PACKAGES = ("jax", "jaxlib", "numpy", "chex", "triton")

PLUGIN_PREFIXES = ("jax-rocm", "jax-cuda", "jax_rocm", "jax_cuda", "libtpu")

ENVIRONMENT = ("JAX_", "XLA_", "HIP_", "ROCR_", "HSA_", "CUDA_VISIBLE")

# What to ask of drivers, where the program is there.
DRIVER_COMMANDS = (
    ("rocm-smi", "--showdriverversion", "--showproductname"),
    ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
)

DRIVER_FILES = ("/sys/module/amdgpu/version", "/opt/rocm/.info/version")

IMPLEMENTATIONS = ("xla", "pallas")

# Largest error against the reference, by dtype: a few units of the last place of
# values around 1.
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclasses.dataclass
class Report:
    """What was found, printed as it comes."""

    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    findings: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def add(self, verdict: str, what: str, detail: str = "") -> None:
        """Note a finding: "ok", "FAILED", "warning" or "not checked"."""
        self.findings.append({"verdict": verdict, "what": what, "detail": detail})
        print(f"  {verdict:<12}{what}{': ' if detail else ''}{detail}", flush=True)

    @property
    def has_failed(self) -> bool:
        """Whether any check failed."""
        return any(each["verdict"] == "FAILED" for each in self.findings)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the attention: shapes and options."""

    name: str
    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    options: tuple[tuple[str, float], ...] = ()
    has_sinks: bool = False
    kv_dtype: str | None = None  # one byte with scales, instead of the queries' dtype


DECODE: dict[str, Any] = {
    "query_lengths": (1, 1, 1),
    "context_lengths": (70, 1, 33),
}

CASES = (
    Case("decode", **DECODE),
    Case("prefill", (33, 5), (33, 40)),
    Case("mixed, with padding", (1, 7, 0, 1), (50, 7, 9, 16)),
    Case("one kv head", **DECODE, num_kv_heads=1),
    Case("no groups", **DECODE, num_heads=2),
    Case("group of 7", **DECODE, num_heads=14),
    Case("head dim 128", **DECODE, head_dim=128),
    Case("head dim 96", **DECODE, head_dim=96),
    Case("head dim 256", **DECODE, head_dim=256),
    Case("blocks of 4", **DECODE, block_size=4),
    Case("blocks of 64", **DECODE, block_size=64),
    Case("window", **DECODE, options=(("window", 20),)),
    Case("soft cap", **DECODE, options=(("soft_cap", 5.0),)),
    Case("sinks", **DECODE, has_sinks=True),
    *(
        Case(dtype.name, (1, 7, 1), (50, 7, 33), kv_dtype=dtype.name)
        for dtype in STORAGE_DTYPES
        if needs_scales(dtype)
    ),
)


def main(arguments: list[str] | None = None) -> int:
    """Run all checks; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jkv.doctor", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--report",
        type=pathlib.Path,
        default=pathlib.Path("jkv-doctor.json"),
        help="file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="skip the measurements of bandwidth"
    )
    options = parser.parse_args(arguments)
    report = Report()
    report.facts = collect_facts()
    print("machine")
    for name, value in report.facts.items():
        print(f"  {name}: {value}")
    print("known combinations")
    for warning in known_bad(report.facts):
        report.add("warning", warning)
    if not report.findings:
        report.add("ok", "nothing known against these versions")
    print("bookkeeping on the device")
    check_bookkeeping(report)
    print("attention against the reference")
    check_attention(report)
    print("bandwidth")
    if options.quick:
        report.add("not checked", "bandwidth", "--quick")
    else:
        measure_bandwidth(report)
    options.report.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n")
    print(f"written to {options.report}")
    print("SOMETHING FAILED" if report.has_failed else "nothing failed")
    return int(report.has_failed)


def collect_facts() -> dict[str, Any]:
    """Return devices, versions, drivers and settings."""
    device = jax.devices()[0]
    installed = {
        str(each.metadata["Name"]): each.version
        for each in importlib.metadata.distributions()
    }
    wanted = [
        name
        for name in installed
        if name in PACKAGES or name.startswith(PLUGIN_PREFIXES) or name == "jkv"
    ]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {name: installed[name] for name in sorted(wanted)},
        "platform": device.platform,
        "platform version": device.client.platform_version,
        "devices": [f"{d.id}: {d.device_kind}" for d in jax.devices()],
        "compute capability": str(getattr(device, "compute_capability", "")),
        "memory": memory_statistics(device),
        "drivers": driver_versions(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT)
        },
    }


def memory_statistics(device: jax.Device) -> dict[str, int]:
    """Return what the device says of its memory, if it does."""
    found = device.memory_stats() or {}
    return {
        name: found[name] for name in ("bytes_limit", "bytes_in_use") if name in found
    }


def driver_versions() -> dict[str, str]:
    """Return what the system says of GPU drivers."""
    found = {}
    for name in DRIVER_FILES:
        if pathlib.Path(name).exists():
            found[name] = pathlib.Path(name).read_text().strip()
    for program, *flags in DRIVER_COMMANDS:
        if shutil.which(program):
            done = subprocess.run(
                [program, *flags], capture_output=True, text=True, timeout=60
            )
            found[program] = " | ".join(done.stdout.split("\n")).strip(" |")
    return found


def known_bad(facts: dict[str, Any]) -> Iterator[str]:
    """Name what is known to go wrong with these versions and settings."""
    versions, environment = facts["versions"], facts["environment"]
    number = tuple(int(part) for part in jax.__version__.split(".")[:3])
    if number < (0, 10, 2):
        yield f"JAX {jax.__version__} is older than 0.10.2, the oldest that is tested"
    for name, version in versions.items():
        if name.startswith(PLUGIN_PREFIXES[:4]) and (
            version.split(".")[:2] != versions["jaxlib"].split(".")[:2]
        ):
            yield (
                f"{name} {version} is not of the same release as jaxlib "
                f"{versions['jaxlib']}; install both by an extra of jax "
                f"(jax[rocm7-local] or jax[cuda13])"
            )
    if "HSA_OVERRIDE_GFX_VERSION" in environment:
        yield (
            "HSA_OVERRIDE_GFX_VERSION makes the card pass for another: kernels are "
            "compiled for that one's registers and matrix instructions"
        )
    if environment.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        yield "XLA_PYTHON_CLIENT_ALLOCATOR=platform allocates anew for every call"
    on_gpu = facts["platform"] in ("gpu", "cuda", "rocm")
    if facts["drivers"] and not on_gpu:
        yield (
            f"there is a GPU driver, but JAX runs on {facts['platform']}: its plugin "
            f"is not installed (jkv[rocm] or jkv[cuda]), or JAX_PLATFORMS hides it"
        )


def check_bookkeeping(report: Report) -> None:
    """Play the verbs in one donated jit, then recount everything."""
    sizes = CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=64,
        num_blocks=64,
        block_size=4,
        max_sequences=8,
        max_context_length=64,
    )

    def cycle(i: jax.Array, cache: Cache) -> Cache:
        cache, opened = allocate(cache, jnp.stack([i % 9, i % 5]))
        cache, batch = append(cache, opened.seq_ids, i % 8, capacity=16)
        rows = jnp.full((16, 2, 64), i, jnp.bfloat16)
        for layer in range(2):
            cache = write(cache, layer, batch, rows, rows)
        cache, forked = fork(cache, opened.seq_ids)
        cache, _ = truncate(cache, forked.seq_ids, i % 3)
        cache, _ = free(cache, opened.seq_ids)
        return free(cache, forked.seq_ids)[0]

    run = jax.jit(lambda c: jax.lax.fori_loop(0, 500, cycle, c), donate_argnums=0)
    cache = run(init(sizes))
    try:
        check(cache)
        num_lost = sizes.num_blocks - int(num_free_blocks(cache))
        found = f"{num_lost} blocks were lost" if num_lost else ""
    except InvariantError as error:
        found = str(error)
    what = "500 cycles of allocate, append, write, fork, truncate, free"
    report.add("FAILED" if found else "ok", what, found)

    # A donated write must not make another pool.
    cache, opened = allocate(cache, [0, 0])
    cache, batch = append(cache, opened.seq_ids)
    rows = jnp.ones((2, 2, 64), jnp.bfloat16)
    step = jax.jit(write, donate_argnums=0)
    compiled = step.lower(cache, 1, batch, rows, rows).compile()
    temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
    if temporary is None:
        report.add("not checked", "donated writes in place", "no memory analysis here")
    else:
        in_place = temporary < cache.keys.nbytes // 4
        detail = f"{temporary:,} bytes beside a pool of {cache.keys.nbytes:,}"
        verdict = "ok" if in_place else "FAILED"
        report.add(verdict, "donated writes in place", detail)


def check_attention(report: Report) -> None:
    """Compare the implementations with the reference, feature by feature."""
    on_cpu = jax.devices()[0].platform == "cpu"
    for implementation, dtype in itertools.product(IMPLEMENTATIONS, TOLERANCES):
        refused: dict[str, list[str]] = {}
        worst = 0.0
        for case in CASES:
            try:
                error = attention_error(case, dtype, implementation)
            except NotImplementedError as reason:
                refused.setdefault(str(reason), []).append(case.name)
                continue
            worst = max(worst, error)
            if not error <= TOLERANCES[dtype]:  # NaN too
                what = f"{implementation}, {dtype}, {case.name}"
                report.add("FAILED", what, f"error {error:.2g}")
        for why, names in refused.items():
            what = f"{implementation}, {dtype}: {', '.join(names)}"
            report.add("not checked", what, why)
        num = len(CASES) - sum(map(len, refused.values()))
        if num:
            how = " (interpreted)" if on_cpu and implementation == "pallas" else ""
            what = f"{implementation}, {dtype}{how}: {num} cases"
            report.add(
                "ok" if worst <= TOLERANCES[dtype] else "FAILED", what, f"{worst:.1e}"
            )
    if on_cpu:
        report.add("not checked", "the compiled kernel", "there is no GPU here")


def attention_error(case: Case, dtype: str, implementation: str) -> float:
    """Return the largest difference from the reference; NaN slots are never read."""
    operands, options = make_operands(case, dtype)
    call = functools.partial(paged_attention, *operands, **options)
    found = jax.jit(functools.partial(call, implementation=implementation))()
    wanted = jax.jit(functools.partial(call, implementation="reference"))()
    return float(
        jnp.max(jnp.abs(found.astype(jnp.float32) - wanted.astype(jnp.float32)))
    )


def make_operands(case: Case, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return random arguments, blocks in random order, NaN where nothing is stored."""
    random = np.random.default_rng(0)
    size, num_rows = case.block_size, sum(case.query_lengths)
    needed = [-(-length // size) for length in case.context_lengths]
    num_blocks, width = sum(needed) + 1, max(needed)
    order = random.permutation(num_blocks)
    tables = np.full((len(needed), width), 2**31 - 1, np.int32)
    shape = (1, num_blocks, case.num_kv_heads, size, case.head_dim)
    keys = np.full(shape, np.nan, np.float32)
    values = keys.copy()
    start = 0
    for row, (num, length) in enumerate(zip(needed, case.context_lengths, strict=True)):
        tables[row, :num] = order[start : start + num]
        start += num
        for position in range(length):
            block = tables[row, position // size]
            slot = (0, block, slice(None), position % size)
            keys[slot], values[slot] = random.standard_normal(
                (2, *shape[2:3], shape[4])
            )
    starts = np.cumsum((0, *case.query_lengths[:-1]))
    queries = random.standard_normal((num_rows, case.num_heads, case.head_dim))
    kv_dtype = jnp.dtype(case.kv_dtype or dtype)
    options: dict[str, Any] = dict(case.options) | {"kv_dtype": kv_dtype}
    if case.has_sinks:
        options["sinks"] = jnp.asarray(
            random.standard_normal(case.num_heads), jnp.float32
        )
    integers = (starts, case.query_lengths, case.context_lengths)
    pools = []
    for name, array in (("key", keys), ("value", values)):
        elements, scales = quantization.quantise(jnp.asarray(array), kv_dtype)
        pools.append(elements)
        options[f"{name}_scales"] = scales
    arrays = [jnp.asarray(queries, dtype), *pools]
    tail = [jnp.asarray(a, jnp.int32) for a in integers]
    return (*arrays, 0, jnp.asarray(tables), None, *tail), options


def measure_bandwidth(report: Report) -> None:
    """Time a copy, and decoding over contexts that fill a good part of the memory."""
    on_cpu = jax.devices()[0].platform == "cpu"
    size = 2**26 if on_cpu else 2**30
    source = jnp.zeros((size // 4,), jnp.float32)
    seconds = median_seconds(jax.jit(lambda a: a + 1), source)
    copied = 2 * size / seconds / 1e9
    report.add(
        "ok", f"a copy of {size >> 20} MiB", f"{copied:,.0f} GB/s, read and write"
    )
    del source

    batch, context = (8, 1024) if on_cpu else (64, 8192)
    heads, kv_heads, head_dim, block_size = 32, 8, 128, 16
    blocks = context // block_size
    shape = (1, batch * blocks, kv_heads, block_size, head_dim)
    pool = jnp.zeros(shape, jnp.bfloat16)
    tables = np.random.default_rng(0).permutation(shape[1]).reshape(batch, blocks)
    queries = jnp.ones((batch, heads, head_dim), jnp.bfloat16)
    ones = jnp.ones((batch,), jnp.int32)
    arguments = (jnp.asarray(tables, jnp.int32), None, jnp.cumsum(ones) - 1, ones)
    num_bytes = 2 * pool.nbytes
    for implementation in (None, *IMPLEMENTATIONS):
        name = implementation or "as chosen"
        what = f"decode, {batch} contexts of {context:,}, bfloat16, {name}"
        if on_cpu and implementation == "pallas":
            report.add("not checked", what, "the kernel is interpreted here")
            continue
        call = functools.partial(paged_attention, implementation=implementation)
        try:
            seconds = median_seconds(
                jax.jit(call), queries, pool, pool, 0, *arguments, ones * context
            )
        except NotImplementedError as reason:
            report.add("not checked", what, str(reason))
            continue
        reached = num_bytes / seconds / 1e9
        detail = f"{reached:,.0f} GB/s, {reached / copied:.0%} of the copy's"
        report.add("ok", what, detail)


def median_seconds(function: Callable[..., jax.Array], *arguments: Any) -> float:
    """Return the median time of a call, compiled before."""
    taken = []
    for _ in range(12):
        began = time.perf_counter()
        function(*arguments).block_until_ready()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


if __name__ == "__main__":
    sys.exit(main())
