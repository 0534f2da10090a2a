"""Attention on a GPU: decode bandwidth and prefill throughput, compared to peers.

    python benchmarks/gpu.py [--quick] [--minutes 8]
    python benchmarks/gpu.py --brief    # all topics in 8 minutes: `gpu_brief.py`
    python benchmarks/gpu.py --all      # everything, for an hour: `gpu_parts.py`

Decoding at batch sizes of 1 to 256 and contexts of 512 to 131,072 tokens, as far as a
pool fits in 60% of the memory, with 32 query and 8 kv heads of 128, in bfloat16, int8
and fp8, and with a latent cache (one kv head of 576, values its first 512); batches
with a 64-fold range of lengths; prefill of 512 to 32,768 tokens; a decode step of 32
layers, its writes and its bookkeeping alone, with rows stored by the kernel and by
scatters; the gradient (`gpu_gradients.py`; alone with `--gradients`); with `--prompts`
alone, prompts with and without cuDNN (`gpu_prompts.py`). The floor is reading keys and
values once: fractions are of the bandwidth of a 2 GiB copy in the same run.

Peers, if installed: jkv's XLA backend, JAX's paged attention (it keeps partial results
in the queries' dtype; the best of 32, 64, 128 and 256 tokens per block is shown),
PyTorch's scaled-dot-product attention over contiguous keys and values of equal lengths.
Missing or unsupported peers are listed with the reason. Workloads that do not start
within `--minutes` are reported as skipped. On a CPU a tiny run checks the benchmark
itself. The kernel's tests, compiled for the GPU, are `python -m pytest
tests/attention/kernel/test_pallas.py`.
"""

import argparse
import functools
import gc
import math
import os
import pathlib
import sys
import time
import unittest.mock
import warnings
from collections.abc import Callable, Sequence
from typing import Any

# Leaves memory for peers outside JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import harness  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from gpu_brief import run_brief  # noqa: E402
from gpu_calls import (  # noqa: E402
    BLOCK_SIZE,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    Operands,
    Workload,
    attend_by_jax,
    attend_by_jkv,
    compile_all,
    draw_arrays,
    find_workloads,
    make_case,
    make_operands,
    make_program,
    shape_operands,
)
from gpu_gradients import measure_gradients  # noqa: E402
from gpu_parts import list_parts, run_parts  # noqa: E402
from gpu_prompts import measure_prompts  # noqa: E402
from gpu_torch import TORCH, Synchronised, import_torch  # noqa: E402
from harness import Case  # noqa: E402

import jkv  # noqa: E402
from jkv.verbs.writing import WRITE_SWITCH  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "results" / "gpu.json"
NUM_LAYERS = 32
SLOW_BYTES = 2**32  # limit for the XLA backend and for peers that copy the pools
PLAIN_BATCH = 64
JKV, PLAIN, OWN = "jkv", "jkv, plain path", "jkv, own Triton lowering"
JAX_TOKENS = 32, 64, 128, 256  # tokens per block of JAX's kernel
DRAW, TURN = "operands", "operands for JAX"
JAX = "jax.experimental paged_attention"


def find_programs(
    workloads: Sequence[Workload], own: Sequence[Workload] = ()
) -> dict[Any, Any]:
    """Return functions and argument shapes to compile, by workload and peer.

    Args:
      workloads: to time.
      own: workloads to time with jkv's own Triton lowering as well.
    """
    programs: dict[Any, Any] = {}
    for workload in workloads:
        shapes = shape_operands(workload)
        programs[workload, DRAW] = functools.partial(draw_arrays, workload), ()
        attend = functools.partial(attend_by_jkv, workload, None)
        programs[workload, JKV] = make_program(workload, attend), (shapes,)
        if workload in own:
            attend = functools.partial(attend_by_jkv, workload, "triton")
            programs[workload, OWN] = make_program(workload, attend), (shapes,)
        if workload.num_bytes > SLOW_BYTES:
            continue
        if len(workload.lengths) == PLAIN_BATCH or workload.dtype == "float32":
            attend = functools.partial(attend_by_jkv, workload, "xla")
            programs[workload, PLAIN] = make_program(workload, attend), (shapes,)
        is_special = workload.is_latent or workload.is_prefill
        if workload.dtype == "bfloat16" and not is_special:
            programs[workload, TURN] = _for_jax, (shapes,)
            turned = jax.eval_shape(_for_jax, shapes)
            for tokens in JAX_TOKENS:
                attend = functools.partial(attend_by_jax, tokens)
                program = make_program(workload, attend)
                programs[workload, f"{JAX}, {tokens} tokens"] = program, (turned,)
    return programs


@jax.jit
def _for_jax(operands: Operands) -> Operands:
    """Return operands in the layout of JAX's paged attention, bf16[K, N, T, D]."""

    def turn(pool: jax.Array) -> list[jax.Array]:
        turned = jax.lax.bitcast_convert_type(pool.swapaxes(1, 2), jnp.bfloat16)
        return list(turned)

    storage = {name: turn(pool) for name, pool in operands.storage.items()}
    return operands._replace(storage=storage)


def torch_program(workload: Workload) -> Callable[[], Any]:
    """Return a CUDA graph of PyTorch's attention, contiguous and of equal lengths."""
    torch = import_torch()
    if len(set(workload.lengths)) > 1 or workload.is_latent:
        raise NotImplementedError("only equal lengths, keys and values apart")
    if workload.dtype != "bfloat16" or workload.num_bytes > SLOW_BYTES:
        raise NotImplementedError("bfloat16 up to 4 GiB")
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    batch, length = len(workload.lengths), workload.lengths[0]
    layers = [
        [make(batch, NUM_KV_HEADS, length, workload.dim) for _ in "kv"]
        for _ in range(workload.num_layers)
    ]
    rows = length if workload.is_prefill else 1
    queries = make(batch, workload.num_heads, rows, workload.dim)

    def run() -> Any:
        rows = queries
        for number in range(workload.num_calls):
            keys, values = layers[number % len(layers)]
            rows = torch.nn.functional.scaled_dot_product_attention(
                rows, keys, values, is_causal=workload.is_prefill, enable_gqa=True
            )
        return rows

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay() -> Any:
        graph.replay()
        return Synchronised()

    return replay


def measure(
    workload: Workload, compiled: dict[Any, Any], rounds: int, copied: float
) -> list[dict[str, Any]]:
    """Return a row per peer, missing ones with their reason."""
    operands = make_operands(workload, compiled[workload, DRAW])
    cases, rows = [], []
    jax_settings = [f"{JAX}, {tokens} tokens" for tokens in JAX_TOKENS]
    for contender in (JKV, OWN, PLAIN, *jax_settings, TORCH):
        labels = {"workload": workload.label, "contender": contender}
        try:
            if contender == TORCH:
                call = torch_program(workload)
            elif (workload, contender) not in compiled:
                continue
            else:
                program = compiled[workload, contender]
                if isinstance(program, Exception):
                    raise program
                given = operands
                if contender in jax_settings:
                    given = compiled[workload, TURN](operands)
                call = functools.partial(program, given)
            jax.block_until_ready(call())
            cases.append(make_case(contender, workload, call, few=contender == PLAIN))
        except Exception as error:  # a refusal is a result
            rows.append({**labels, "refused": f"{type(error).__name__}: {error}"[:200]})
    if not cases:
        return rows
    samples = harness.interleave(cases, rounds=rounds, warmup=1, seconds_per_case=4)
    tried = [name for name in jax_settings if name in samples]
    best = min(tried, key=lambda name: samples[name].median, default=None)
    cases = [case for case in cases if case.name not in tried or case.name == best]
    for case in cases:
        taken = samples[case.name]
        contender, _, setting = case.name.partition(JAX)
        row = {"workload": workload.label, "contender": contender or JAX, **taken.row()}
        if setting:
            row["setting"] = setting.removeprefix(", ")
        if workload.is_prefill:
            row["TFLOP/s"] = workload.num_operations / taken.median / 1e12
        else:
            reached = workload.num_bytes / taken.median
            row |= {"GB/s": reached / 1e9, "of a copy": reached / copied}
        row["ratio"] = taken.ratio_to(samples[JKV]) if JKV in samples else None
        rows.append(row | {"bytes": workload.num_bytes})
    return rows


def measure_calls(
    workloads: Sequence[Workload],
    compiled: dict[Any, Any],
    rounds: int,
    copied: float,
    deadline: float = math.inf,
    save: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of all workloads; workloads after the deadline are skipped.

    Args:
      workloads: to time.
      compiled: their programs.
      rounds: samples of each case.
      copied: bandwidth of a copy, bytes per second.
      deadline: of `time.monotonic`, after which no workload starts.
      save: called with all rows so far after each workload.
    """
    rows: list[dict[str, Any]] = []
    for workload in workloads:
        if time.monotonic() > deadline:
            rows.append({"workload": workload.label, "refused": "no time was left"})
            continue
        try:
            rows += measure(workload, compiled, rounds, copied)
        except Exception as error:  # out of memory, for example: measure the others
            rows.append({"workload": workload.label, "refused": str(error)[:200]})
        gc.collect()
        if "torch" in sys.modules:  # releases torch's cached memory
            sys.modules["torch"].cuda.empty_cache()
        if save is not None:
            save(rows)
        print(f"  measured {workload.label}", flush=True)
    return rows


def measure_step(batch: int, context: int, rounds: int) -> list[dict[str, Any]]:
    """Return times of a decode step of all layers, its writes and its bookkeeping."""
    config = jkv.CacheConfig.for_context_length(
        context + 64,
        max_sequences=batch,
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
    )
    seq_ids = jnp.arange(batch, dtype=jnp.int32)
    calls = 10  # enqueued together in a sample

    def bookkeeping(cache: jkv.Cache) -> tuple[jkv.Cache, jkv.Batch]:
        cache, batch = jkv.append(cache, seq_ids)
        return jkv.commit(cache, batch), batch

    def step(cache: jkv.Cache, attends: bool = True) -> tuple[jkv.Cache, jax.Array]:
        cache, batch = jkv.append(cache, seq_ids)
        hidden = jnp.ones((len(seq_ids), NUM_HEADS, HEAD_DIM), jnp.bfloat16)

        def layer(
            number: jax.Array, carry: tuple[jkv.Cache, jax.Array]
        ) -> tuple[jkv.Cache, jax.Array]:
            cache, hidden = carry
            rows = hidden[:, :NUM_KV_HEADS]
            cache = jkv.write(cache, number, batch, rows, rows)
            if attends:
                hidden = jkv.attend(cache, number, batch, hidden)
            return cache, hidden

        cache, hidden = jax.lax.fori_loop(0, NUM_LAYERS, layer, (cache, hidden))
        return jkv.commit(cache, batch), hidden

    def by_scatters(cache: jkv.Cache, attends: bool) -> tuple[jkv.Cache, jax.Array]:
        # The switch is read during tracing.
        with unittest.mock.patch.dict(os.environ, {WRITE_SWITCH: "0"}):
            return step(cache, attends)

    held: list[Any] = []
    # The writes of all layers alone, and by the kernel if there is one.
    functions: dict[str, Any] = {
        "step": step,
        "step, rows by scatters": functools.partial(by_scatters, attends=True),
        "writes": functools.partial(step, attends=False),
        "writes by scatters": functools.partial(by_scatters, attends=False),
        "bookkeeping": bookkeeping,
    }

    def fill(cache: jkv.Cache) -> jkv.Cache:
        cache, _ = jkv.allocate(cache, [context] * len(seq_ids))
        return jkv.append(cache, seq_ids, context, max_query_length=context)[0]

    def cut(cache: jkv.Cache) -> jkv.Cache:
        return jkv.truncate(cache, seq_ids, context)[0]

    shapes = jax.eval_shape(functools.partial(jkv.init, config))
    compiled = compile_all(
        {
            name: (jax.jit(function, donate_argnums=0), (shapes,))
            for name, function in {**functions, "fill": fill, "cut": cut}.items()
        }
    )
    harness.wait_for_turn()

    def prepare() -> None:
        held.append(jax.block_until_ready(compiled["cut"](held.pop())))

    def run(name: str, _: None) -> None:
        for _ in range(calls):
            held[0], result = compiled[name](held[0])
        jax.block_until_ready(result)

    cases = [
        Case(name=name, prepare=prepare, run=functools.partial(run, name), calls=calls)
        for name in functions
    ]
    held.append(compiled["fill"](jkv.init(config)))
    samples = harness.interleave(cases, rounds=rounds, warmup=1)
    label = {"batch": batch, "context": context, "layers": NUM_LAYERS}
    return [
        {
            **label,
            "what": name,
            **taken.row(),
            "share": 1.0 if name == "step" else taken.ratio_to(samples["step"]),
        }
        for name, taken in samples.items()
    ]


def copy_bandwidth(num_bytes: int, rounds: int) -> float:
    """Return bytes per second, read and written, of adding one to an array."""
    source = jnp.ones((num_bytes // 4,), jnp.float32)
    add = jax.jit(lambda a: a + 1)

    def run(_: None) -> Any:
        for _ in range(10):
            result = add(source)
        return jax.block_until_ready(result)

    case = Case(name="copy", prepare=lambda: None, run=run, calls=10)
    return 2 * num_bytes / harness.interleave([case], rounds=rounds)["copy"].median


def _show_gradients(rows: list[dict[str, Any]]) -> str:
    columns = {
        k: k for k in ("sequences", "contender", "median", "p10", "p90", "TFLOP/s")
    }
    return harness.table(rows, columns | {"ratio": "time by jkv", "refused": "refused"})


def _show_calls(rows: list[dict[str, Any]]) -> str:
    columns = {k: k for k in ("workload", "contender", "median", "p10", "p90", "GB/s")}
    columns |= {"of a copy": "of a copy", "TFLOP/s": "TFLOP/s"}
    columns |= {"ratio": "time by jkv", "setting": "setting"}
    return harness.table(rows, columns | {"refused": "refused"})


def _show_prompts(rows: list[dict[str, Any]]) -> str:
    columns = {k: k for k in ("step", "contender", "median", "p10", "p90", "TFLOP/s")}
    columns |= {"by jkv": "time by jkv", "by torch": "time by torch"}
    return harness.table(rows, columns | {"refused": "refused"})


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--brief", action="store_true", help="8 minutes, all topics")
    parser.add_argument("--only", nargs="+", default=[], help="parts of --brief")
    parser.add_argument("--all", action="store_true", help="all GPU benchmarks")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--gradients", action="store_true", help="nothing else")
    parser.add_argument("--prompts", action="store_true", help="nothing else")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    if options.brief:
        results = RESULTS.with_name("gpu_brief.json")
        failed = run_brief(options.quick, results, only=options.only)
        sys.exit(1 if failed else 0)
    if options.all:
        sys.exit(1 if run_parts(list_parts()) else 0)
    began = time.monotonic()
    where = harness.machine()
    quick = options.quick or where["platform"] == "cpu"
    print(harness.header("Attention on a GPU", where), flush=True)
    if options.gradients:
        print(_show_gradients(measure_gradients(quick, options.rounds)))
        return
    if options.prompts:
        print(_show_prompts(measure_prompts(quick, options.rounds)))
        return
    statistics = jax.devices()[0].memory_stats() or {}
    workloads = find_workloads(statistics.get("bytes_limit", 2**31), quick)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled = compile_all(find_programs(workloads))
    spent = time.monotonic() - began
    print(f"{len(compiled)} programs compiled in {spent:.0f} s", flush=True)
    copied = copy_bandwidth(2**24 if quick else 2**31, options.rounds)
    print(f"a copy: {copied / 1e9:,.0f} GB/s", flush=True)
    shape = (2, 64) if quick else (64, 2_048)
    step = measure_step(*shape, options.rounds)
    print(harness.table(step, {k: k for k in step[0]}), flush=True)
    deadline = began + 60 * options.minutes
    rows = measure_calls(workloads, compiled, options.rounds, copied, deadline)
    print("\n" + _show_calls(rows))
    gradients: list[dict[str, Any]] = []
    if time.monotonic() - began < 60 * options.minutes:
        gradients = measure_gradients(quick, options.rounds)
        print("\n" + _show_gradients(gradients))
    run = {
        "benchmark": "gpu",
        "machine": where,
        "copy GB/s": copied / 1e9,
        "calls": rows,
        "step": step,
        "gradients": gradients,
    }
    if quick:
        print("a tiny run: nothing is saved")
        return
    harness.save(options.json, run)
    print(f"\nsaved in {options.json}")


if __name__ == "__main__":
    main()
