"""Correctness of the kernels on a GPU: storage formats, layouts and options.

    python benchmarks/gpu_correctness.py [--quick] [--json FILE]

Two kinds of cases, each compared with the reference implementation: the calls of
`python -m jkv.doctor` in bfloat16 (three of them also in float16 and float32), and
whole steps of a cache in seven storage formats and two layouts, with forks that share a
prefix, a sliding window and NaN in the rows of one sequence. jkv's own Triton lowering
is compared with Pallas' bit by bit, and a batch-invariant call with itself at another
batch size. Compilation dominates, so the cases run in several processes.
"""

import argparse
import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import harness  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jkv  # noqa: E402
from jkv.commands import correctness  # noqa: E402

NUM_PROCESSES = 8
FORMATS = (
    *("bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "int4"),
)
LAYOUTS = "grouped heads", "latent"
FEW = "decode", "prefill", "mixed, with padding"
# Errors are roundings of bfloat16 results around 1; formats are compared with the
# reference on the same stored elements.
TOLERANCE = 3e-2
Case = tuple[str, ...]


def list_cases(quick: bool) -> list[Case]:
    """Return the cases, in `run_case`'s form."""
    if quick:
        return [
            ("call", "bfloat16", "decode"),
            ("step", "int8", "grouped heads", "full"),
            ("lowering",),
        ]
    steps = itertools.product(FORMATS, LAYOUTS, ("full", "window"))
    return [
        *(("step", *names) for names in steps),
        *(("call", "bfloat16", case.name) for case in correctness.CASES),
        *(("call", dtype, name) for dtype in ("float16", "float32") for name in FEW),
        ("lowering",),
        ("batch-invariant",),
    ]


def run_case(case: Case) -> dict[str, Any]:
    """Run a case; return a row with its error, or with the reason of its failure."""
    kind, *names = case
    began = time.perf_counter()
    row: dict[str, Any] = {"case": ", ".join(case)}
    run: Callable[..., float] = {
        "call": _compare_call,
        "step": _compare_step,
        "lowering": _compare_lowerings,
        "batch-invariant": _compare_batch_sizes,
    }[kind]
    try:
        error = run(*names)
        row["error"] = error
        if not error <= TOLERANCE:  # also true for NaN
            row["failed"] = f"error {error:.2g}"
    except NotImplementedError as error:
        row["refused"] = str(error)[:120]
    except Exception as error:  # one fault must not hide the others
        row["failed"] = f"{type(error).__name__}: {error}"[:200]
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def run_cases(cases: list[Case], num_processes: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of all cases, in order of completion."""
    context = multiprocessing.get_context("spawn")  # JAX does not survive a fork
    with concurrent.futures.ProcessPoolExecutor(num_processes, context) as pool:
        futures = [pool.submit(run_case, case) for case in cases]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()


def _compare_call(dtype: str, name: str) -> float:
    (case,) = (each for each in correctness.CASES if each.name == name)
    error = correctness.find_error(case, dtype, "pallas")
    limit = correctness.TOLERANCES[dtype]
    return error * TOLERANCE / limit  # in units of the dtype's own tolerance


def _compare_step(dtype: str, layout: str, window: str) -> float:
    """Return the largest error of a decode step after a fork, beside a NaN."""
    is_latent = layout == "latent"
    sizes: dict[str, Any] = dict(num_kv_heads=2, head_dim=128)
    if is_latent:
        sizes = dict(
            num_kv_heads=1, head_dim=576, value_head_dim=512, values_in_keys=True
        )
    config = jkv.CacheConfig(
        num_layers=1,
        num_blocks=64,
        block_size=16,
        max_sequences=8,
        max_context_length=256,
        dtype=dtype,
        **sizes,
    )
    heads, dim = 8, sizes["head_dim"]
    prompts = jnp.array([70, 33, 5], jnp.int32)
    capacity = 128
    key = jax.random.split(jax.random.key(0), 5)
    shape = capacity, sizes["num_kv_heads"]
    keys = jax.random.normal(key[0], (*shape, dim), jnp.bfloat16)
    values = jax.random.normal(key[1], (*shape, dim), jnp.bfloat16)
    queries = jax.random.normal(key[2], (5, heads, dim), jnp.bfloat16)
    # The third sequence owns rows 103 to 107.
    keys = keys.at[103:108].set(jnp.nan)

    def step(cache: jkv.Cache, implementation: str) -> jax.Array:
        cache, opened = jkv.allocate(cache, jnp.zeros((3,), jnp.int32))
        cache, batch = jkv.append(cache, opened.seq_ids, prompts, capacity=capacity)
        stored = None if is_latent else values
        cache = jkv.commit(jkv.write(cache, 0, batch, keys, stored), batch)
        cache, forked = jkv.fork(cache, opened.seq_ids[jnp.array([0, 0])])
        seq_ids = jnp.concatenate([opened.seq_ids, forked.seq_ids])
        cache, batch = jkv.append(cache, seq_ids)
        more = None if is_latent else values[:5]
        cache = jkv.write(cache, 0, batch, keys[:5], more)
        return jkv.attend(
            cache,
            0,
            batch,
            queries,
            window=24 if window == "window" else None,
            implementation=implementation,
        )

    run = jax.jit(step, static_argnums=1)
    found, wanted = (
        np.asarray(run(jkv.init(config), name), np.float32)
        for name in ("pallas", "reference")
    )
    finite = np.array([0, 1, 3, 4])
    return float(np.max(np.abs(found[finite] - wanted[finite])))


def _compare_lowerings() -> float:
    """Return 0 if jkv's own Triton lowering is bit-identical to Pallas'."""
    names = ("decode", "prefill") if not correctness.on_cpu() else ("decode",)
    worst = 0.0
    for case in correctness.CASES:
        if case.name not in names:
            continue
        operands, options = correctness.make_operands(case, "bfloat16")
        call = functools.partial(jkv.paged_attention, *operands, **options)
        found, wanted = (
            np.asarray(jax.jit(functools.partial(call, implementation=name))())
            for name in ("triton", "pallas")
        )
        worst = max(worst, 0.0 if np.array_equal(found, wanted) else np.inf)
    return worst


def _compare_batch_sizes() -> float:
    """Return 0 if a sequence's bits do not depend on the rest of the batch."""
    (case,) = (each for each in correctness.CASES if each.name == "decode")
    operands, options = correctness.make_operands(case, "bfloat16")
    queries, keys, values, layer, tables, _, starts, lengths, contexts = operands
    call = functools.partial(
        jkv.paged_attention, by_position=True, implementation="pallas", **options
    )
    batched = jax.jit(call)(
        *(queries, keys, values, layer, tables, None, starts, lengths, contexts)
    )
    alone = jax.jit(call)(
        *(queries[:1], keys, values, layer, tables[:1], None),
        *(starts[:1], lengths[:1], contexts[:1]),
    )
    return 0.0 if np.array_equal(batched[:1], alone) else np.inf


def main() -> None:
    """Run all cases, print them, and save them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three cases")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    harness.wait_for_turn()
    rows = []
    cases = list_cases(options.quick)
    for row in run_cases(cases, 1 if options.quick else NUM_PROCESSES):
        rows.append(row)
        print(f"{len(rows)} of {len(cases)}: {row}", flush=True)
        if options.json:
            harness.save_rows(options.json, rows)
    columns = {name: name for name in ("case", "error", "failed", "refused", "seconds")}
    print(harness.table(rows, columns))
    failed = sum("failed" in row for row in rows)
    refused = sum("refused" in row for row in rows)
    print(f"{len(rows) - failed - refused} right, {failed} wrong, {refused} refused")


if __name__ == "__main__":
    main()
