"""Time paged attention against dense contiguous attention and memory bandwidth.

    python benchmarks/attention.py [--only NAME] [--rounds N]

One sample is the attention of all layers of a step. Dense attention
(`jax.nn.dot_product_attention`) reads contiguous keys and values, `[B, S, K, D]` with S
the longest context, and masks shorter ones. `jnp.sum` over 256 MiB of float32, in the
same rounds, measures the memory bandwidth.

Sequences with a shared prompt are timed with shared-prefix attention and without, and
so are prompts that share nothing.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import Case

from jkv.attention import paged_attention
from jkv.attention.backend import Requests
from jkv.attention.shared_prefixes import find_shared_prefixes

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "attention.json"
SUM_BYTES = 2**28

sys.path.insert(0, str(ROOT / "tests"))
from support.attention.attention_workloads import (  # noqa: E402, shapes shared with the tests
    WORKLOADS,
    Operands,
    Workload,
    decode,
    make_operands,
    shrink,
)

# Targets: paged over dense time, and the fraction of the bandwidth.
MAX_RATIO = {
    "decode-equal": 1.0,
    "decode-one-long": 0.15,
    "decode-equal-grouped": 1.0,
    "decode-one-long-grouped": 0.15,
    "prefill": 1.5,
    "prefill-grouped": 1.5,
}
MIN_PART = {"decode-long-context": 0.5}


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", default="", help="part of a workload's name")
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, to see that it runs"
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        help=f"default {RESULTS.name}, none if --quick or --only",
    )
    arguments = parser.parse_args()
    where = harness.machine()
    print(harness.header("jkv attention: paged, dense, and the memory", where))
    print(
        f"  {arguments.rounds} interleaved rounds after 2 warm-ups, float32; "
        "milliseconds for all layers\n"
    )
    rows = []
    for workload in WORKLOADS:
        if arguments.only in workload.name:
            if arguments.quick:
                workload = shrink(workload)
            rows.append(measure(workload, arguments.rounds))
    shared = []
    if arguments.only in "shared":
        for many in ((16, 1, 8), (8, 1, 32), (16, 2, 32)):
            shared.append(
                measure_shared(*many, arguments.rounds, quick=arguments.quick)
            )
        print(harness.table(shared, {name: name for name in shared[0]}) + "\n")
    where["load after"] = harness.machine()["load"]
    columns = {
        "workload": "",
        "shapes": "requests x heads/kv heads x dim, layers",
        "tokens": "tokens",
        "median": "paged",
        "p10": "p10",
        "p90": "p90",
        "dense": "dense",
        "dense_p10": "p10",
        "dense_p90": "p90",
        "by_dense": "x dense",
        "gigabytes": "GB/s",
        "sum_gigabytes": "sum GB/s",
        "by_sum": "part",
        "verdict": "target",
    }
    print(harness.table(rows, columns) if rows else "")
    print(
        "\nx dense: paged by dense, median over the rounds. GB/s: float32 keys and\n"
        "values of the contexts by the paged median. part: the time jnp.sum takes for\n"
        "as many bytes, by the paged time."
    )
    path = arguments.json
    if path is None and not (arguments.quick or arguments.only):
        path = RESULTS
    if path is not None:
        run = {"benchmark": "attention", "machine": where, "rows": rows}
        run["shared"] = shared
        harness.save(path, run | {"rounds": arguments.rounds})


def measure(workload: Workload, rounds: int) -> dict[str, Any]:
    """Check that all implementations agree, then time them interleaved."""
    operands = make_operands(workload)
    calls = {
        "paged": make_paged(workload, operands),
        "dense": make_dense(workload, operands),
        "sum": make_sum(),
    }
    paged, dense = (np.asarray(calls[name]()) for name in ("paged", "dense"))
    np.testing.assert_allclose(paged, dense, rtol=1e-4, atol=1e-4)
    cases = [
        Case(
            name=name,
            prepare=lambda: None,
            run=lambda _, call=call: jax.block_until_ready(call()),
        )
        for name, call in calls.items()
    ]
    samples = harness.interleave(cases, rounds=rounds, warmup=2)
    paged, dense, memory = (samples[name] for name in ("paged", "dense", "sum"))
    dense_row = dense.row(1e3)
    row = {
        "workload": workload.name,
        "shapes": f"{len(workload.query_lengths)} x {workload.num_heads}/"
        f"{workload.num_kv_heads} x {workload.head_dim}, {workload.num_layers}",
        "tokens": workload.num_tokens,
        **paged.row(1e3),
        "dense": dense_row["median"],
        "dense_p10": dense_row["p10"],
        "dense_p90": dense_row["p90"],
        "by_dense": paged.ratio_to(dense),
        "gigabytes": workload.kv_bytes / paged.median / 1e9,
        "sum_gigabytes": SUM_BYTES / memory.median / 1e9,
        "by_sum": memory.ratio_to(paged) * workload.kv_bytes / SUM_BYTES,
    }
    return row | {"verdict": verdict(row)}


def measure_shared(
    num_sequences: int, num_prompts: int, num_heads: int, rounds: int, *, quick: bool
) -> dict[str, Any]:
    """Time sequences that share prompts of 2,048 tokens, with 128 own tokens each."""
    prompt, own = (64, 32) if quick else (2048, 128)
    context = prompt + own
    workload = decode("shared", (context,) * num_sequences, num_heads=num_heads)
    operands, size = make_operands(workload), workload.block_size
    apart = np.array(operands.block_tables)
    per_prompt, columns = num_sequences // num_prompts, prompt // size
    together = apart.copy()
    for row in range(num_sequences):
        together[row, :columns] = apart[row - row % per_prompt, :columns]
    cases = {}
    for name, tables in (("shared", together), ("apart", apart)):
        used = tables[:, : -(-context // size)]
        counts = np.bincount(used.reshape(-1), minlength=operands.key_pool.shape[1])
        rows = np.arange(num_sequences, dtype=np.int32)
        requests = Requests(jnp.asarray(tables), rows, *operands[4:7])
        found = find_shared_prefixes(
            requests, jnp.asarray(counts, jnp.int32), block_size=size
        )
        tables_only = operands._replace(block_tables=tables)
        cases[f"{name}, once"] = make_paged(workload, tables_only, {"xla": found})
        cases[f"{name}, each"] = make_paged(workload, tables_only)
    once, each = (np.asarray(cases[f"shared, {how}"]()) for how in ("once", "each"))
    np.testing.assert_allclose(once, each, atol=1e-6)
    samples = harness.interleave(
        [
            Case(
                name=name,
                prepare=lambda: None,
                run=lambda _, call=call: jax.block_until_ready(call()),
            )
            for name, call in cases.items()
        ],
        rounds=rounds,
        warmup=2,
    )
    return {
        "sequences": f"{num_sequences} behind {num_prompts}",
        "heads": f"{num_heads}/{workload.num_kv_heads}",
        "read for each": 1e3 * samples["shared, each"].median,
        "read once": 1e3 * samples["shared, once"].median,
        "of its time": samples["shared, once"].ratio_to(samples["shared, each"]),
        "nothing shared": samples["apart, once"].ratio_to(samples["apart, each"]),
    }


def verdict(row: dict[str, Any]) -> str:
    """Return the target and "met" or "missed"."""
    name = row["workload"]
    if name in MAX_RATIO:
        met, limit = row["by_dense"] <= MAX_RATIO[name], f"<= {MAX_RATIO[name]} dense"
    elif name in MIN_PART:
        met, limit = row["by_sum"] >= MIN_PART[name], f">= {MIN_PART[name]} of sum"
    else:
        return ""
    return f"{limit}: {'met' if met else 'missed'}"


def make_paged(
    workload: Workload, operands: Operands, lists: dict[str, Any] | None = None
) -> Callable[[], jax.Array]:
    """Return all layers' attention through block tables, including the step's plan."""

    @jax.jit
    def attend(queries, key_pool, value_pool, tables, *rest):
        *rows, lists = rest

        def attend_layer(layer):
            return paged_attention(
                queries[layer],
                key_pool,
                value_pool,
                layer,
                tables,
                None,
                *rows,
                work_lists=lists,
            )

        layers = jnp.arange(workload.num_layers, dtype=jnp.int32)
        return jax.lax.map(attend_layer, layers)

    arrays = [jnp.asarray(array) for array in operands[:7]]
    return lambda: attend(*arrays, lists)


def make_dense(workload: Workload, operands: Operands) -> Callable[[], jax.Array]:
    """Return all layers' attention over contiguous keys and values."""
    is_decode = max(workload.query_lengths) == 1
    if is_decode:
        keys, values = (
            [jnp.asarray(layer) for layer in pad_contexts(contents)]
            for contents in (operands.keys, operands.values)
        )
        queries = jnp.asarray(operands.queries)[:, :, None]  # [L, B, 1, H, D]
        contexts = jnp.asarray(operands.context_lengths)

        @jax.jit
        def attend(queries, keys, values):
            outputs = [
                jax.nn.dot_product_attention(
                    *layer, key_value_seq_lengths=contexts, scale=None
                )
                for layer in zip(queries, keys, values, strict=True)
            ]
            return jnp.stack(outputs)[:, :, 0]

        return lambda: attend(queries, keys, values)

    # Prefill: each request separately, its last rows over its whole context.
    starts, lengths = operands.query_starts, operands.query_lengths
    requests = [
        (
            jnp.asarray(operands.queries[:, None, start : start + length]),
            [jnp.asarray(layer) for layer in keys[:, None]],
            [jnp.asarray(layer) for layer in values[:, None]],
        )
        for start, length, keys, values in zip(
            starts, lengths, operands.keys, operands.values, strict=True
        )
    ]

    @jax.jit
    def attend_requests(requests):
        outputs = []
        for queries, keys, values in requests:
            # Square shapes are causal; others need an explicit mask.
            rows, tokens = queries.shape[2], keys[0].shape[1]
            mask = (
                None if rows == tokens else jnp.tri(rows, tokens, tokens - rows, bool)
            )
            outputs.append(
                jnp.stack(
                    [
                        jax.nn.dot_product_attention(
                            *layer,
                            is_causal=rows == tokens,
                            mask=None if mask is None else mask[None, None],
                        )[0]
                        for layer in zip(queries, keys, values, strict=True)
                    ]
                )
            )
        return jnp.concatenate(outputs, axis=1)

    return lambda: attend_requests(requests)


def pad_contexts(contents: list[np.ndarray]) -> np.ndarray:
    """Stack `[L, context, K, D]` of each request into `[L, B, longest, K, D]`."""
    longest = max(tokens.shape[1] for tokens in contents)
    padded = [
        np.pad(tokens, ((0, 0), (0, longest - tokens.shape[1]), (0, 0), (0, 0)))
        for tokens in contents
    ]
    return np.stack(padded, axis=1)


def make_sum() -> Callable[[], jax.Array]:
    """Return a call that reads the memory once."""
    numbers = jnp.ones(SUM_BYTES // 4, jnp.float32)
    add_up = jax.jit(jnp.sum)
    return lambda: add_up(numbers)


if __name__ == "__main__":
    main()
