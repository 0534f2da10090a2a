"""Log-probabilities of completions with a shared prompt, and their gradient.

    python benchmarks/scoring.py [--quick]

One prompt and several completions of a small decoder, float32, random weights: a step
of policy-gradient training. Compared are `jkv.score` with the prompt shared;
`jkv.score` with one prompt per completion, which is as many full forward passes on the
same attention; and the same passes on dense attention, one after another.

Dense attention loops over tiles of query rows, whose scores fit in the CPU's cache and
are recomputed in the backward pass; it computes masked scores, which paged attention
skips. Whole score arrays, [H, L, L], are 570 MB per layer at 4,224 tokens and were
several times slower than tiles.

The upper bound of the speedup by sharing is the ratio of rows: P + G * (C - 1) against
G * (P + C - 1), 6.5 at the default sizes; for attention G * C * P of P * P / 2 + G * C
* P against G times P * P / 2 + C * P, 5.1.
"""

import argparse
import functools
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

RESULTS = pathlib.Path(__file__).parent / "results" / "scoring.json"
SHARED, APART, DENSE = "prompt shared", "a prompt each", "dense passes"
# Target speedups of sharing over either alternative.
AIMS = {"forward": 4.0, "gradient": 2.0}
# Query rows of a tile of dense attention; 32 to 128 performed alike.
TILE = 64

Score = Callable[[Any, jax.Array, jax.Array], jax.Array]


def paged_score(shapes: Shapes, *, is_shared: bool) -> Score:
    """Return a function of weights, i32[P] and i32[G, C] to f32[G, C]."""
    config = jkv.CacheConfig(
        num_layers=shapes.num_layers,
        num_kv_heads=shapes.num_kv_heads,
        head_dim=shapes.head_dim,
        num_blocks=1,
        max_sequences=1,
        max_context_length=1,
    )

    def model(params: Any, tokens: Any, cache: Any, batch: Any) -> Any:
        def attend(layer: int, queries: Any, keys: Any, values: Any) -> Any:
            nonlocal cache
            cache = jkv.write(cache, layer, batch, keys, values)
            return jkv.attend(cache, layer, batch, queries)

        positions, rows = batch.positions, batch.last_rows
        logits = compute_logits(params, tokens, positions, attend, shapes, rows)
        return logits, cache

    def score(params: Any, prompt: jax.Array, continuations: jax.Array) -> jax.Array:
        count = 1 if is_shared else continuations.shape[0]
        prompts = jnp.broadcast_to(prompt[None], (count, *prompt.shape))
        return jkv.score(model, params, prompts, continuations, config=config)

    return score


def dense_score(shapes: Shapes) -> Score:
    """Return the same with one full forward pass per completion."""

    def attend(layer: int, queries: Any, keys: Any, values: Any) -> jax.Array:
        del layer
        return attend_densely(queries, keys, values)

    def score(params: Any, prompt: jax.Array, continuations: jax.Array) -> jax.Array:
        def score_one(continuation: jax.Array) -> jax.Array:
            sequence = jnp.concatenate([prompt, continuation[:-1]])
            positions = jnp.arange(len(sequence), dtype=jnp.int32)
            rows = slice(len(prompt) - 1, None)
            logits = compute_logits(params, sequence, positions, attend, shapes, rows)
            found = jax.nn.log_softmax(logits)
            return jnp.take_along_axis(found, continuation[:, None], axis=1)[:, 0]

        return jax.lax.map(score_one, continuations)

    return score


def attend_densely(
    queries: jax.Array,  # f32[L, H, D]
    keys: jax.Array,  # f32[L, K, D]
    values: jax.Array,  # f32[L, K, D]
) -> jax.Array:
    """Return causal self-attention of one sequence, f32[L, H, D], tile by tile."""
    length, num_kv_heads, head_dim = keys.shape
    heads_per_kv = queries.shape[1] // num_kv_heads
    shape = (-1, TILE, num_kv_heads, heads_per_kv, head_dim)
    padded = jnp.pad(queries, ((0, -length % TILE), (0, 0), (0, 0)))
    tiles = padded.reshape(shape).transpose(0, 2, 3, 1, 4)
    of_head = keys.transpose(1, 2, 0), values.transpose(1, 0, 2)
    positions = jnp.arange(len(padded), dtype=jnp.int32).reshape(-1, TILE)

    @jax.checkpoint
    def attend_tile(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, positions = tile  # f32[K, heads_per_kv, TILE, D], i32[TILE]
        rows = queries.reshape(num_kv_heads, heads_per_kv * TILE, head_dim)
        scores = jnp.einsum("kqd,kdt->kqt", rows, of_head[0]) * head_dim**-0.5
        is_past = np.arange(length) <= jnp.tile(positions, heads_per_kv)[:, None]
        weights = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf), axis=-1)
        return jnp.einsum("kqt,ktd->kqd", weights, of_head[1]).reshape(queries.shape)

    found = jax.lax.map(attend_tile, (tiles, positions))
    return found.transpose(0, 3, 1, 2, 4).reshape(padded.shape)[:length]


def make_cases(
    shapes: Shapes, num_prompt: int, num_continuations: int, length: int
) -> list[Case]:
    """Return a case for each contender, forward and with the gradient."""
    rng = np.random.default_rng(0)

    def draw(leaf: Any) -> jax.Array:
        scale = leaf.shape[0] ** -0.5
        return jnp.asarray(scale * rng.standard_normal(leaf.shape, np.float32))

    def draw_tokens(*shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(0, shapes.vocabulary, shape, np.int32))

    params = jax.tree.map(draw, describe_weights(shapes))
    sequences = draw_tokens(num_prompt), draw_tokens(num_continuations, length)
    weights = jnp.asarray(rng.standard_normal(sequences[1].shape, np.float32))
    contenders = {
        SHARED: paged_score(shapes, is_shared=True),
        APART: paged_score(shapes, is_shared=False),
        DENSE: dense_score(shapes),
    }
    expected: dict[str, Any] = {}
    cases = []
    for name, score in contenders.items():

        def loss(params: Any, *sequences: Any, score: Score = score) -> jax.Array:
            return jnp.sum(score(params, *sequences) * weights)

        for kind, function in {"forward": score, "gradient": jax.grad(loss)}.items():
            cases.append(
                Case(
                    name=f"{name}, {kind}",
                    prepare=lambda: (params, *sequences),
                    run=functools.partial(_run, jax.jit(function)),
                    check=functools.partial(_compare, expected, kind),
                    labels={"contender": name, "kind": kind},
                )
            )
    return cases


def _run(function: Callable[..., Any], arguments: Any) -> Any:
    return jax.block_until_ready(function(*arguments))


def _compare(expected: dict[str, Any], kind: str, found: Any) -> None:
    """Raise unless all contenders return equal numbers."""
    found = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
    for one, other in zip(found, expected.setdefault(kind, found), strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(one, other, atol=1e-4 * scale, rtol=0)


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=4096, help="tokens; %(default)s")
    parser.add_argument("--continuations", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens of each")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="few tokens, to see that it runs"
    )
    options = parser.parse_args()
    if options.quick:
        options.prompt, options.length, options.rounds = 64, 8, 2
    shapes = Shapes(
        num_layers=options.layers, num_heads=8, num_kv_heads=4, hidden_dim=1024
    )
    where = harness.machine()
    print(harness.header("jkv: scoring continuations of one prompt", where))
    cases = make_cases(shapes, options.prompt, options.continuations, options.length)
    samples = harness.interleave(cases, rounds=options.rounds, warmup=1)
    rows: list[dict[str, Any]] = []
    for case in cases:
        kind = case.labels["kind"]
        row: dict[str, Any] = {**case.labels, **samples[case.name].row(1.0)}
        shared = samples[f"{SHARED}, {kind}"]
        row["times the shared"] = samples[case.name].ratio_to(shared)
        row["aim"] = AIMS[kind]
        rows.append(row)
    where["load after"] = harness.machine()["load"]
    print("\nseconds\n" + harness.table(rows, {key: key for key in rows[0]}))
    if not options.quick:
        sizes = {
            key: getattr(options, key)
            for key in ("prompt", "continuations", "length", "layers")
        }
        run = {"benchmark": "scoring", "machine": where, "sizes": sizes, "unit": "s"}
        harness.save(RESULTS, run | {"rows": rows})
        print(f"\nwritten to {RESULTS.name}")


if __name__ == "__main__":
    main()
