"""Cost of masks within a step, compared with causal steps of the same rows.

    python benchmarks/masks.py [--quick]

A whole step of a small decoder, float32, random weights. The lower bound of a span's
extra cost is its dense product: half of R x R scores of the step's own rows, added to
the weight products that a causal step has, too. At 256 rows, 8 heads of 64 and four
layers these are 2 * 2 * 128 * 256 * 8 * 64 operations a layer, 67 million of some 700
million.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
from decoder import Shapes, compute_logits, describe_weights
from harness import Case

import jkv
from jkv.masks import Mask

RESULTS = pathlib.Path(__file__).parent / "results" / "masks.json"


class Step(NamedTuple):
    """A step under a mask, its causal counterpart, and the cost limit."""

    rows: tuple[int, ...]  # by request
    past: int  # cached tokens of each request
    mask: Mask
    max_span: int
    aim: float


def list_steps(scale: int) -> dict[str, Step]:
    """Return the steps by name; `scale` divides their rows."""
    rows = 256 // scale
    span = jkv.SpanMask(jnp.full((rows,), rows - 1))
    canvas = jkv.SpanMask(jnp.full((rows,), rows - 1), one_window=True)
    images = np.full(4 * rows, -1, np.int32)
    images[rows // 2 : rows // 2 + rows] = rows // 2 + rows - 1
    images[2 * rows : 3 * rows] = 3 * rows - 1
    tree = jnp.tile(jnp.array([-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7]), 8)
    return {
        "a span of 256": Step((rows,), 0, span, rows, 1.10),
        "a span of 256, past 1,024": Step((rows,), 1024 // scale, span, rows, 1.10),
        "a canvas of 256, past 1,024": Step((rows,), 1024 // scale, canvas, rows, 1.15),
        "1,024 rows with 2 images of 256, past 256": Step(
            (4 * rows,), rows, jkv.SpanMask(jnp.asarray(images)), rows, 1.15
        ),
        "8 trees of 16, past 512": Step(
            (16,) * 8, 512 // scale, jkv.TreeMask(tree), 16, 1.05
        ),
    }


def make_cases(shapes: Shapes, steps: dict[str, Step]) -> list[Case]:
    """Return a masked and a causal case for each step."""
    rng = np.random.default_rng(0)

    def draw(leaf: Any) -> jax.Array:
        spread = leaf.shape[0] ** -0.5
        return jnp.asarray(spread * rng.standard_normal(leaf.shape, np.float32))

    params = jax.tree.map(draw, describe_weights(shapes))
    cases = []
    for name, step in steps.items():
        for is_masked in (True, False):
            run = _make_run(shapes, step, is_masked=is_masked)
            tokens = jnp.asarray(rng.integers(0, shapes.vocabulary, sum(step.rows)))
            cache = _fill(shapes, step)
            kind = "masked" if is_masked else "causal"
            cases.append(
                Case(
                    name=f"{name}, {kind}",
                    prepare=lambda cache=cache, tokens=tokens: (
                        params,
                        jax.tree.map(jnp.copy, cache),
                        tokens,
                    ),
                    run=lambda given, run=run: jax.block_until_ready(run(*given)),
                    labels={"step": name, "kind": kind, "aim": step.aim},
                )
            )
    return cases


def _fill(shapes: Shapes, step: Step) -> jkv.Cache:
    """Return a cache with the tokens before the step."""
    count, most = len(step.rows), step.past + max(step.rows)
    config = jkv.CacheConfig(
        num_layers=shapes.num_layers,
        num_kv_heads=shapes.num_kv_heads,
        head_dim=shapes.head_dim,
        num_blocks=count * (-(-most // 16) + 1),
        max_sequences=count,
        max_context_length=most,
        dtype="float32",
    )
    cache, opened = jkv.allocate(jkv.init(config), [0] * count)
    if not step.past:
        return cache
    rows = count * step.past
    cache, batch = jkv.append(cache, opened.seq_ids, step.past, capacity=rows)
    given = jnp.asarray(
        np.random.default_rng(1).standard_normal(
            (rows, shapes.num_kv_heads, shapes.head_dim), np.float32
        )
    )
    for layer in range(shapes.num_layers):
        cache = jkv.write(cache, layer, batch, given, given)
    return cache


def _make_run(shapes: Shapes, step: Step, *, is_masked: bool) -> Callable[..., Any]:
    """Return the jitted step, with the cache donated."""
    counts, capacity = jnp.asarray(step.rows), sum(step.rows)
    ids = jnp.arange(len(step.rows), dtype=jnp.int32)
    options: dict[str, Any] = {}
    if is_masked:
        options = {"mask": step.mask, "max_span": step.max_span}

    def run(params: Any, cache: jkv.Cache, tokens: jax.Array) -> Any:
        cache, batch = jkv.append(cache, ids, counts, capacity=capacity, **options)

        def attend(layer: int, queries: Any, keys: Any, values: Any) -> Any:
            nonlocal cache
            cache = jkv.write(cache, layer, batch, keys, values)
            return jkv.attend(cache, layer, batch, queries)

        rows = jnp.minimum(batch.last_rows, capacity - 1)
        logits = compute_logits(params, tokens, batch.positions, attend, shapes, rows)
        return cache, logits

    return jax.jit(run, donate_argnums=1)


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--quick", action="store_true", help="few rows, to see that it runs"
    )
    options = parser.parse_args()
    shapes = Shapes(
        num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64, hidden_dim=2048
    )
    where = harness.machine()
    print(harness.header("jkv: masks within a step", where))
    cases = make_cases(shapes, list_steps(8 if options.quick else 1))
    rounds = 2 if options.quick else options.rounds
    samples = harness.interleave(cases, rounds=rounds, warmup=1)
    rows: list[dict[str, Any]] = []
    for case in cases:
        row: dict[str, Any] = {**case.labels, **samples[case.name].row(1e3)}
        causal = samples[f"{case.labels['step']}, causal"]
        row["times the causal"] = samples[case.name].ratio_to(causal)
        rows.append(row)
    where["load after"] = harness.machine()["load"]
    print("\nmilliseconds\n" + harness.table(rows, {key: key for key in rows[0]}))
    if not options.quick:
        run = {"benchmark": "masks", "machine": where, "unit": "ms"}
        harness.save(RESULTS, run | {"rows": rows})
        print(f"\nwritten to {RESULTS.name}")


if __name__ == "__main__":
    main()
