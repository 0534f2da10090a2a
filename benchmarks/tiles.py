"""Tune the attention kernel's tiles on the available GPU.

    python benchmarks/tiles.py [--only int8] [--minutes 5]

For each kind of call in the tuning table it compiles the table's tile and others, times
all of them interleaved, and prints them, fastest first. A tile is rejected if its
results differ from the XLA backend's. Attach its output,
`benchmarks/results/tiles.json`, to a report: table rows for a GPU family were chosen
from machine code if no such GPU was available.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import time
import warnings
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import harness  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from gpu_calls import (  # noqa: E402
    LATENT_VALUE_DIM,
    Operands,
    Workload,
    attend_by_jkv,
    compile_all,
    cut_rows,
    make_case,
    make_operands,
    make_program,
    shape_operands,
)

from jkv.attention import make_pools  # noqa: E402  # noqa: E402
from jkv.attention.backend import Call, Pools, Requests, make_requests  # noqa: E402  # noqa: E402
from jkv.attention.kernel.backend import Way
from jkv.attention.kernel.launches.attention import attend_kernel  # noqa: E402
from jkv.attention.kernel.tiles.table import Techniques, Tile, Tuning  # noqa: E402
from jkv.attention.kernel.work.planning import find_local_tuning  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "results" / "tiles.json"
# One call per program suffices if it is long. For short ones only the number of
# programs varies.
LONG = functools.partial(Workload, calls=1)
DECODE = (8_192,) * 64
WORKLOADS = {
    "bfloat16": LONG(DECODE),
    "prefill": LONG((8_192,), is_prefill=True),
    "latent": LONG(DECODE, is_latent=True),
    "float32": LONG(DECODE, dtype="float32"),
    "prefill float32": LONG((2_048,), is_prefill=True, dtype="float32"),
    "int8": LONG(DECODE, dtype="int8"),
    "fp8": LONG(DECODE, dtype="fp8"),
    "blocks of 16": LONG(DECODE, block_size=16),
    "short": Workload((1_024,) * 64),
    "alone": Workload((8_192,)),
    "64": LONG(DECODE, head_dim=64),
    "256": LONG(DECODE, head_dim=256),
    "prefill int8": LONG((8_192,), is_prefill=True, dtype="int8"),
    "prefill 256": LONG((8_192,), is_prefill=True, head_dim=256),
    "latent int8": LONG(DECODE, is_latent=True, dtype="int8"),
    "latent fp8": LONG(DECODE, is_latent=True, dtype="fp8"),
    "latent 128": LONG(DECODE, is_latent=True, num_heads=128),
    "prefill latent": LONG((4_096,), is_prefill=True, is_latent=True),
    "prefill 64": LONG((8_192,), is_prefill=True, head_dim=64),
    "int8 64": LONG(DECODE, head_dim=64, dtype="int8"),
}
QUICK = {"bfloat16": LONG((64,)), "prefill": LONG((64,), is_prefill=True)}


def find_tiles(table: Tile | None, workload: Workload) -> list[Tile]:
    """Return the table's tile, if there is one, and alternatives."""
    is_wide = workload.dim > 128 or workload.dtype == "float32"
    tokens = (16, 32, 64) if is_wide or not workload.is_prefill else (32, 64)
    if workload.is_prefill:
        rows = (32, 64, 128) if is_wide else (64, 128)
        shapes = itertools.product(rows, tokens, (4, 8), (1, 2, 3, 4))
        found = [Tile(*shape, ways=Techniques.FULL_FIRST) for shape in shapes]
    else:
        rows = (16,)
        if workload.is_latent:
            rows = (32, 64)
        shapes = itertools.product(rows, tokens, (1, 2, 4, 8), (1, 3, 5))
        found = [Tile(*shape) for shape in shapes]
        # Limits the registers per token of a warp.
        found = [t for t in found if t.tokens <= 32 * t.num_warps]
        found = [t for t in found if t.num_warps >= 4 or not workload.is_latent]
        carried = [t for t in found if t.num_stages == 1]
        found += [dataclasses.replace(t, ways=Techniques.CARRIED) for t in carried]
        if workload.dtype in ("int8", "fp8"):
            words = Techniques.WORDS | Techniques.E4M3_WORDS
            sections = (128, 512) if workload.is_latent else (512,)
            found += [
                dataclasses.replace(t, ways=t.ways | words, section=section)
                for t, section in itertools.product(found, sections)
            ]
    first = [] if table is None else [table]
    if workload.dtype == "float32":
        split = Techniques.SPLIT & table.ways if table is not None else Techniques(0)
        found = [dataclasses.replace(t, ways=t.ways | split) for t in found]
    return [*first, *(tile for tile in found if tile != table)]


def attend_with(
    workload: Workload,
    tuning: Tuning,
    queries: jax.Array,
    operands: Operands,
    layer: int,
) -> jax.Array:
    """Attend by the kernel with a given tuning."""
    pools, lengths = pools_of(workload, operands.storage), operands.lengths
    limit = None if workload.is_prefill else 1
    requests = make_requests(
        Requests(
            operands.tables,
            jnp.arange(len(lengths), dtype=jnp.int32),
            *cut_rows(workload, lengths),
            lengths,
        ),
        num_rows=len(queries),
        block_size=pools.block_size,
        max_query_length=limit,
    )
    call = Call(
        queries=queries,
        pools=pools,
        layer=jnp.int32(layer),
        requests=requests,
        scale=jnp.float32(workload.dim**-0.5),
        window=None,
        sinks=None,
        soft_cap=None,
        max_query_length=limit,
    )
    return attend_kernel(call, tuning=tuning, way=Way())[0]


def pools_of(workload: Workload, storage: dict[str, jax.Array]) -> Pools:
    """Return a cache's arrays as the kernel's pools."""
    return make_pools(
        (storage["key_pool"], storage.get("key_scales")),
        (storage.get("value_pool"), storage.get("value_scales")),
        has_layers=True,
        dtypes=[workload.config.dtype] * 2,
        value_head_dim=LATENT_VALUE_DIM if workload.is_latent else None,
    )


def find_table_tuning(workload: Workload) -> Tuning | None:
    """Return the table's tuning of a workload on this GPU, None without a row."""
    storage = shape_operands(workload).storage
    pools = jax.eval_shape(functools.partial(pools_of, workload), storage)
    return find_local_tuning(pools)


def find_tunings(
    workload: Workload, table: Tuning | None, units: int
) -> dict[str, Tuning]:
    """Return the candidate tunings of a workload by label; the table's comes first."""
    kernel = "prefill" if workload.is_prefill else "decode"
    tile = None if table is None else getattr(table, kernel)
    tiles = find_tiles(tile, workload) if workload.calls == 1 else [tile]
    base = table or Tuning(tiles[0], tiles[0], 8 * units)
    found = {
        describe(each): dataclasses.replace(base, **{kernel: each}) for each in tiles
    }
    if not workload.is_prefill:
        for programs in (2, 4, 8, 12, 16):
            words = f"{describe(tiles[0])}, {programs} programs a unit"
            found[words] = dataclasses.replace(base, programs=programs * units)
    return found


def describe(tile: Tile) -> str:
    """Return a tile's label."""
    more = ", carried" if Techniques.CARRIED in tile.ways else ""
    if Techniques.WORDS in tile.ways:
        more += ", words"
    if Techniques.SPLIT in tile.ways:
        more += ", in tf32"
    if tile.section < 512:
        more += f", {tile.section} columns"
    return (
        f"{tile.rows} x {tile.tokens}, {tile.num_warps} warps, "
        f"{tile.num_stages} stages{more}"
    )


def measure(
    name: str, workload: Workload, units: int, rounds: int
) -> list[dict[str, Any]]:
    """Return a row per tile, fastest first, rejected ones last."""
    table = find_table_tuning(workload)
    tunings = find_tunings(workload, table, units)
    shapes = shape_operands(workload)
    programs = {
        words: (
            make_program(workload, functools.partial(attend_with, workload, tuning)),
            (shapes,),
        )
        for words, tuning in tunings.items()
    }
    plain = functools.partial(attend_by_jkv, workload, "xla")
    programs[""] = make_program(workload, plain), (shapes,)
    compiled = compile_all(programs)
    operands = make_operands(workload)
    cases, refused = [], []
    expected = compiled.pop("")(operands)[0].astype(jnp.float32)
    largest = float(jnp.max(jnp.abs(expected)))
    for words, program in compiled.items():
        row = {"kind": name, "tile": words}
        try:
            if isinstance(program, Exception):
                raise program
            output = program(operands)[0].astype(jnp.float32)
            error = float(jnp.max(jnp.abs(output - expected))) / largest
            if not error < 0.02:
                raise ValueError(f"wrong by {error:.2g} of the largest")
            run = functools.partial(program, operands)
            cases.append(make_case(words, workload, run))
        except Exception as reason:  # too much shared memory, mostly
            reason_given = f"{type(reason).__name__}: {reason}"
            refused.append({**row, "refused": reason_given[:120]})
    samples = harness.interleave(cases, rounds=rounds, warmup=1, seconds_per_case=2)
    rows = []
    for case in cases:
        taken = samples[case.name]
        row = {"kind": name, "tile": case.name, **taken.row()}
        if workload.is_prefill:
            row["TFLOP/s"] = workload.num_operations / taken.median / 1e12
        else:
            row["GB/s"] = workload.num_bytes / taken.median / 1e9
        rows.append(row | {"in the table": tunings[case.name] == table})
    return sorted(rows, key=lambda row: row["median"]) + refused


def report(rows: Sequence[dict[str, Any]], most: int = 12) -> str:
    """Return the fastest rows of a kind, and the table's, as text."""
    timed = [row for row in rows if "median" in row]
    shown = timed[:most] + [row for row in timed[most:] if row["in the table"]]
    columns = ("kind", "tile", "median", "p10", "p90", "GB/s", "TFLOP/s")
    columns += ("in the table",)
    refused = len(rows) - len(timed)
    text = harness.table(shown, {k: k for k in columns})
    return f"{text}\n{len(timed)} timed, {refused} refused\n"


def main() -> None:
    """Time, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    began = time.monotonic()
    where = harness.machine()
    if where["platform"] == "cpu":
        raise SystemExit("no supported GPU found; run this on a GPU")
    print(harness.header("Tiles of the attention kernel", where), flush=True)
    units = getattr(jax.devices()[0], "core_count", None) or 1
    workloads = QUICK if options.quick else {k: WORKLOADS[k] for k in options.only}
    rows: list[dict[str, Any]] = []
    for name, workload in workloads.items():
        if time.monotonic() - began > 60 * options.minutes:
            print(f"{name}: no time was left", flush=True)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            found = measure(name, workload, units, options.rounds)
        spent = time.monotonic() - began
        print(f"{workload.label}, after {spent:.0f} s\n{report(found)}", flush=True)
        rows += found
    if not options.quick:
        run = {"benchmark": "tiles", "machine": where, "tiles": rows}
        harness.save(options.json, run)
        print(f"saved in {options.json}")


if __name__ == "__main__":
    main()
