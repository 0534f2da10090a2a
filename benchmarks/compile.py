"""CPU time to trace, lower and compile one decode step, compared to a dense cache.

    python benchmarks/compile.py [--quick]

A small decoder with unrolled layers, one token per sequence: on a contiguous cache `[B,
max, K, D]` per layer, on jkv, and on jkv with prefix caching. A step on jkv is
`append`, `write` and `attend` per layer, and `commit`; both caches are donated. JAX's
caches are cleared before each sample, and the one-time costs of a process are paid
beforehand. CPU time counts all threads: XLA on CPU compiles in several, and load
changes it less than wall time.
"""

import argparse
import dataclasses
import gc
import os
import pathlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

# A cached program would not be compiled.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import harness
import jax
import jax.numpy as jnp
from decoder import Shapes, compute_logits, describe_weights
from operations import _instructions

import jkv

RESULTS = pathlib.Path(__file__).parent / "results" / "compile.json"
PARTS = ("trace", "lower", "compile", "all")
DENSE, PAGED, REUSING = "dense", "jkv", "jkv, prefix caching"
LIMITS = {PAGED: 2.5, REUSING: 4.0}


def dense_step(shapes: Shapes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a step on contiguous arrays, and its argument shapes."""
    heads_per_kv = shapes.num_heads // shapes.num_kv_heads
    cached = jax.ShapeDtypeStruct(
        (
            shapes.batch_size,
            shapes.max_context_length,
            shapes.num_kv_heads,
            shapes.head_dim,
        ),
        jnp.float32,
    )
    integers = jax.ShapeDtypeStruct((shapes.batch_size,), jnp.int32)

    def step(cache: Any, params: Any, tokens: jax.Array) -> Any:
        positions, layers = cache["lengths"], list(cache["layers"])
        rows = jnp.arange(shapes.batch_size)
        columns = jnp.arange(shapes.max_context_length)
        visible = columns[None, None, None] <= positions[:, None, None, None]

        def attend(layer: int, queries: Any, keys: Any, values: Any) -> jax.Array:
            all_keys = layers[layer][0].at[rows, positions].set(keys)
            all_values = layers[layer][1].at[rows, positions].set(values)
            layers[layer] = all_keys, all_values
            grouped = queries.reshape(len(rows), -1, heads_per_kv, shapes.head_dim)
            scores = jnp.einsum("bkgd,btkd->bkgt", grouped, all_keys)
            scores = jnp.where(visible, scores * shapes.head_dim**-0.5, -1e30)
            weights = jax.nn.softmax(scores, axis=-1)
            return jnp.einsum("bkgt,btkd->bkgd", weights, all_values)

        logits = compute_logits(params, tokens, positions, attend, shapes)
        return {"lengths": positions + 1, "layers": layers}, logits

    layers = [(cached, cached) for _ in range(shapes.num_layers)]
    cache = {"lengths": integers, "layers": layers}
    return step, (cache, describe_weights(shapes), integers)


def paged_step(
    shapes: Shapes, prefix_caching: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a step on jkv, and its argument shapes."""
    block_size = 16
    config = jkv.CacheConfig(
        num_layers=shapes.num_layers,
        num_kv_heads=shapes.num_kv_heads,
        head_dim=shapes.head_dim,
        num_blocks=shapes.batch_size * shapes.max_context_length // block_size,
        block_size=block_size,
        max_sequences=shapes.batch_size,
        max_context_length=shapes.max_context_length,
        dtype=jnp.float32,
        prefix_caching=prefix_caching,
    )
    integers = jax.ShapeDtypeStruct((shapes.batch_size,), jnp.int32)

    def step(cache: Any, params: Any, seq_ids: jax.Array, tokens: jax.Array) -> Any:
        known = tokens if prefix_caching else None
        cache, batch = jkv.append(cache, seq_ids, tokens=known)

        def attend(layer: int, queries: Any, keys: Any, values: Any) -> Any:
            nonlocal cache
            cache = jkv.write(cache, layer, batch, keys, values)
            return jkv.attend(cache, layer, batch, queries)

        logits = compute_logits(params, tokens, batch.positions, attend, shapes)
        return jkv.commit(cache, batch), logits

    cache = jax.eval_shape(lambda: jkv.init(config))
    return step, (cache, describe_weights(shapes), integers, integers)


def compile_once(step: Callable[..., Any], arguments: Any) -> tuple[Any, Any, Any]:
    """Return CPU seconds by stage, the traced and lowered program, the compiled one."""
    # A new lambda: a function traced before could be found in a cache.
    jax.clear_caches()
    gc.collect()
    times = [time.process_time()]
    traced = jax.jit(lambda *a: step(*a), donate_argnums=0).trace(*arguments)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    compiled = lowered.compile()
    times.append(time.process_time())
    parts = [after - before for before, after in zip(times, times[1:], strict=False)]
    seconds = dict(zip(PARTS, [*parts, times[-1] - times[0]], strict=True))
    return seconds, (traced, lowered), compiled


def counts(traced: Any, lowered: Any, compiled: Any) -> dict[str, int]:
    """Return sizes of the program at each stage, which are deterministic."""
    text = compiled.as_text()
    opcodes = [opcode for opcode, _ in _instructions(text)]
    return {
        "equations": _num_equations(traced.jaxpr.jaxpr),
        "StableHLO operations": lowered.as_text().count(" = "),
        "instructions": len(opcodes),
        "fusions": opcodes.count("fusion"),
        "loops": opcodes.count("while"),
        "computations": sum(line.endswith("{") for line in text.splitlines()) - 1,
    }


def _num_equations(jaxpr: Any) -> int:
    """Count equations; inner functions count once per call."""
    inner = [
        getattr(value, "jaxpr", value)
        for equation in jaxpr.eqns
        for value in jax.tree.leaves(list(equation.params.values()))
    ]
    return len(jaxpr.eqns) + sum(_num_equations(j) for j in inner if hasattr(j, "eqns"))


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, to see that it runs"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, help=f"default {RESULTS.name}, none if --quick"
    )
    arguments = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    rounds = min(arguments.rounds, 2) if arguments.quick else arguments.rounds
    all_layers = (1, 2) if arguments.quick else (1, 8)

    where = harness.machine()
    print(harness.header("jkv: compile time of a decode step", where))
    print(f"  {rounds} interleaved rounds after a warm-up; seconds of processor time")
    steps = {}
    for num_layers in all_layers:
        shapes = Shapes(num_layers)
        steps[num_layers, DENSE] = dense_step(shapes)
        steps[num_layers, PAGED] = paged_step(shapes, False)
        steps[num_layers, REUSING] = paged_step(shapes, True)
    counted = {}
    for case, step in steps.items():
        _, traced, compiled = compile_once(*step)
        counted[case] = counts(*traced, compiled)
        del traced, compiled
    seconds: dict[Any, list[dict[str, float]]] = {case: [] for case in steps}
    order = random.Random(0)
    for _ in range(rounds):
        for case in order.sample(list(steps), len(steps)):
            seconds[case].append(compile_once(*steps[case])[0])
    where["load after"] = harness.machine()["load"]

    rows = []
    for (num_layers, name), samples in seconds.items():
        dense = seconds[num_layers, DENSE]
        row: dict[str, Any] = {"layers": num_layers, "cache": name}
        for part in PARTS:
            row[part] = statistics.median(sample[part] for sample in samples)
        ordered = sorted(sample["all"] for sample in samples)
        row["least"], row["most"] = ordered[0], ordered[-1]
        row["ratio"] = statistics.median(
            mine["all"] / its["all"] for mine, its in zip(samples, dense, strict=True)
        )
        rows.append(row)
    columns = {key: key for key in rows[0]} | {"cache": "", "ratio": "x dense"}
    print("\n" + harness.table(rows, columns))
    for num_layers, name in steps:
        counted[num_layers, name] = {
            "layers": num_layers,
            "cache": name,
            **counted[num_layers, name],
        }
    print("\n" + harness.table(counted.values(), {k: k for k in counted[1, DENSE]}))
    targets = [
        {
            "target": f"{row['cache']}, {row['layers']} layers / {DENSE}",
            "measured": row["ratio"],
            "limit": LIMITS[row["cache"]],
            "verdict": "met" if row["ratio"] <= LIMITS[row["cache"]] else "MISSED",
        }
        for row in rows
        if row["cache"] in LIMITS and row["layers"] == all_layers[-1]
    ]
    headings = {"target": "target", "measured": "measured", "limit": "at most"}
    print("\n" + harness.table(targets, {**headings, "verdict": ""}))

    path = arguments.json or (None if arguments.quick else RESULTS)
    if path:
        run = {
            "benchmark": "compile",
            "machine": where,
            "shapes": dataclasses.asdict(Shapes(all_layers[-1])),
            "rounds": rounds,
            "unit": "s of processor time",
            "rows": rows,
            "compiled": list(counted.values()),
            "targets": targets,
        }
        harness.save(path, run)
        print(f"\nwritten to {path.name}")


if __name__ == "__main__":
    main()
