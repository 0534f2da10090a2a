"""Cost of deterministic, batch-invariant decoding (`exact=True`): steps and prompts.

    python benchmarks/exact.py [--rounds N] [--quick]

A model of 8 layers, hidden size 512, 8 query heads and 2 kv heads, a vocabulary of
4,096, random weights in float32. Steps: 64 sequences at context 200 or 1,000. Prompts:
16 of 512 tokens, one new token each.

The floor is 1 for steps, whose matrix products have as many rows, and for prompts the
slowdown of products with 64 rows relative to 512.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from decoder import Shapes, compute_logits, describe_weights
from harness import Case

import jkv
from jkv import decoding
from jkv.decoding.model.steps import Exact

RESULTS = pathlib.Path(__file__).parent / "results" / "exact.json"
SHAPES = Shapes(
    num_layers=8,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    hidden_dim=2048,
    vocabulary=4096,
)
NUM_STEPS, STATIC = (
    4,
    (*("model", "max_new_tokens", "max_running", "chunk_size", "exact"),),
)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model without own weights."""

    shapes: Shapes = SHAPES

    def __call__(
        self, params: Any, tokens: jax.Array, cache: jkv.Cache, batch: jkv.Batch
    ) -> tuple[jax.Array, jkv.Cache]:
        """Run one step, as a `jkv.Model`."""

        def attend(layer: int, *given: jax.Array) -> jax.Array:
            nonlocal cache
            queries, keys, values = given
            cache = jkv.write(cache, layer, batch, keys, values)
            return jkv.attend(cache, layer, batch, queries)

        logits = compute_logits(
            params, tokens, batch.positions, attend, self.shapes, batch.last_rows
        )
        return logits, cache


def make_params(shapes: Shapes) -> Any:
    """Return random weights."""
    leaves, structure = jax.tree.flatten(describe_weights(shapes))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(
        structure,
        [
            jax.random.normal(key, leaf.shape, jnp.float32) * leaf.shape[0] ** -0.5
            for key, leaf in zip(keys, leaves, strict=True)
        ],
    )


def make_prompts(count: int, length: int) -> np.ndarray[Any, Any]:
    """Return tokens, i32[count, length]."""
    return np.random.default_rng(0).integers(0, 4096, (count, length), np.int32)


def make_cache(count: int, length: int) -> jkv.Cache:
    """Return a cache for `count` sequences of `length` tokens."""
    return jkv.init(
        jkv.CacheConfig.for_context_length(
            length,
            max_sequences=count,
            num_layers=SHAPES.num_layers,
            num_kv_heads=SHAPES.num_kv_heads,
            head_dim=SHAPES.head_dim,
            dtype=jnp.float32,
        )
    )


copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
prefill = jax.jit(decoding.prefill, static_argnames=STATIC)
decode = jax.jit(
    decoding.decode, static_argnames="model", donate_argnames=("cache", "state")
)
generate = jax.jit(jkv.generate, static_argnames=STATIC, donate_argnames="cache")


def step_case(params: Any, count: int, context: int, exact: bool) -> Case:
    """Return decode steps of sequences at a given context."""
    name = f"{count} at {context}"
    # Sequences with finished prompts decode while other prompts are computed.
    model, cache = Decoder(), make_cache(count, context + 160)
    begun = prefill(
        model,
        params,
        cache,
        make_prompts(count, context),
        max_new_tokens=128,
        max_running=count,
        chunk_size=2048,
    )
    if exact:
        # Prompts in larger steps, which are not timed, then steps of one shape.
        shape = Exact(count, count)
        state = dataclasses.replace(begun[1], exact=shape, row_counts=(count,))
        begun = begun[0], state
    lengths = np.asarray(begun[1].result.lengths)

    def run(given: Any) -> Any:
        _, state = decode(model, params, *given, num_steps=np.int32(NUM_STEPS))
        return jax.block_until_ready(state)

    def check(state: Any) -> None:
        assert (np.asarray(state.result.lengths) == lengths + NUM_STEPS).all()

    return Case(
        name=f"step, {name}{', exact' if exact else ''}",
        prepare=lambda: jax.block_until_ready(copy(begun)),
        run=run,
        calls=NUM_STEPS,
        check=check,
    )


def prompt_case(params: Any, count: int, length: int, exact: bool) -> Case:
    """Return the computation of prompts."""
    model, cache = Decoder(), make_cache(count, length + 16)
    prompts = make_prompts(count, length)

    def run(cache: jkv.Cache) -> Any:
        return jax.block_until_ready(
            generate(model, params, cache, prompts, max_new_tokens=1, exact=exact)[1]
        )

    return Case(
        name=f"prompts, {count} of {length}{', exact' if exact else ''}",
        prepare=lambda: jax.block_until_ready(copy(cache)),
        run=run,
    )


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="to see that it runs")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    params = make_params(SHAPES)
    kinds: list[tuple[Callable[..., Case], int, int, float | None]] = [
        (step_case, 64, 200, 1.25),
        (step_case, 64, 1000, 1.25),
        (prompt_case, 16, 512, 2.0),
    ]
    if options.quick:
        kinds = [(step_case, 8, 40, None), (prompt_case, 2, 70, None)]
    rows = []
    for make, count, length, limit in kinds:
        cases = [make(params, count, length, exact) for exact in (False, True)]
        samples = harness.interleave(
            cases, rounds=1 if options.quick else options.rounds, warmup=2
        )
        plain, exact = (samples[case.name] for case in cases)
        ratio = exact.ratio_to(plain)
        verdict = "" if limit is None else "met" if ratio <= limit else "MISSED"
        rows.append({"case": cases[0].name} | plain.row(1e3) | {"by plain": 1.0})
        rows.append(
            {"case": cases[1].name}
            | exact.row(1e3)
            | {"by plain": ratio, "limit": limit, "": verdict}
        )
    where = harness.machine()
    print(harness.header("Deterministic decoding", where))
    names = ("case", "median", "p10", "p90", "by plain", "limit", "")
    print(harness.table(rows, {name: name for name in names}))
    if not options.quick:
        run = {"benchmark": "exact", "machine": where, "rows": rows}
        harness.save(options.json, run)


if __name__ == "__main__":
    main()
