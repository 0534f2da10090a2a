"""Log-probabilities of a trajectory tree and their gradient, as in agent training.

    python benchmarks/trees.py [--quick]

A prompt of 512 tokens and 8 turns; each turn has 8 samples of 64 tokens, one of them
continued by the next turn. 4,608 distinct tokens in 65 segments. The samples' tokens,
4,096, are scored; a weighted sum of them is differentiated, as in a policy gradient. A
small decoder, float32, random weights. Contenders:

* tree: `jkv.score` of the whole `TrajectoryTree`, 4,608 rows in one call of the model;
* tree in parts: the same, partitioned by `jkv.trees.split` into parts of at most 1,536
  rows, one after another;
* one level: the prompt once, followed by each of the 64 trajectories, 18,944 rows in
  one call;
* separate passes: each of the 64 trajectories alone, one after another, 51,200 rows.

All use the same attention. Memory is XLA's temporary allocation: it grows with the rows
of one call, so separate passes need least.
"""

import argparse
import functools
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

RESULTS = pathlib.Path(__file__).parent / "results" / "trees.json"
TREE, PARTS, LEVEL, APART = "tree", "tree in parts", "one level", "separate passes"
# Target speedups of the tree, forward and with the gradient.
AIMS = {LEVEL: 2.5, APART: 6.0}

Loss = Callable[[Any, jax.Array], jax.Array]


class Workload(NamedTuple):
    """The trajectories to score."""

    prompt: np.ndarray[Any, Any]  # i32[P]
    samples: np.ndarray[Any, Any]  # i32[turns, branches, C]; the first one continues
    weights: np.ndarray[Any, Any]  # f32[turns, branches, C], of each token in the loss

    @property
    def num_sequences(self) -> int:
        """Number of trajectories."""
        return self.samples.shape[0] * self.samples.shape[1]

    def past(self, turn: int) -> np.ndarray[Any, Any]:
        """Return the common prefix of a turn's samples."""
        return np.concatenate([self.prompt, self.samples[:turn, 0].reshape(-1)])


def draw_workload(prompt: int, turns: int, branches: int, length: int) -> Workload:
    """Draw tokens and weights."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray[Any, Any]:
        return rng.integers(0, Shapes(1).vocabulary, shape, np.int32)

    sizes = turns, branches, length
    weights = rng.standard_normal(sizes, np.float32)
    return Workload(draw(prompt), draw(*sizes), weights)


def plant_tree(work: Workload) -> tuple[jkv.TrajectoryTree, jax.Array]:
    """Return the tree, and the weight of each row."""
    tree, trunk = jkv.TrajectoryTree.of([work.prompt]), 0
    for samples in work.samples:
        tree, segments = jkv.trees.grow(tree, samples, trunk)
        trunk = int(segments[0])
    weights = np.concatenate([np.zeros(len(work.prompt)), work.weights.reshape(-1)])
    return tree, jnp.asarray(weights, jnp.float32)


def plant_one_level(work: Workload) -> tuple[jkv.TrajectoryTree, jax.Array]:
    """Return the prompt with each trajectory after it, and the weight of each row."""
    sequences, weights, first = (
        [work.prompt],
        [np.zeros(len(work.prompt))],
        len(work.prompt),
    )
    for turn, samples in enumerate(work.samples):
        behind = work.past(turn)[first:]
        for branch, sample in enumerate(samples):
            sequences.append(np.concatenate([behind, sample]))
            zeros = np.zeros(len(behind))
            weights.append(np.concatenate([zeros, work.weights[turn, branch]]))
    tree = jkv.TrajectoryTree.of(sequences, [-1] + [0] * work.num_sequences)
    return tree, jnp.asarray(np.concatenate(weights), jnp.float32)


def weigh(score: Callable[..., jax.Array], params: Any, *of_tree: Any) -> jax.Array:
    """Return the loss of a tree's rows."""
    tree, weights = of_tree
    scores = score(params, tree)
    return jnp.sum(jnp.where(weights != 0, scores * weights, 0.0))


def make_score(shapes: Shapes) -> Callable[..., jax.Array]:
    """Return a function of weights and a tree."""
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

    return functools.partial(jkv.score, model, config=config)


class Pass(NamedTuple):
    """A call: trees of one size, one after another."""

    trees: jkv.TrajectoryTree  # arrays with a leading axis of trees
    weights: jax.Array  # f32[trees, rows]


def list_passes(work: Workload, max_rows: int) -> dict[str, list[Pass]]:
    """Return the passes of each contender."""
    tree, weights = plant_tree(work)
    parts = jkv.trees.split(tree, max_rows)
    of_parts = weights.at[parts.rows].get(mode="fill", fill_value=0.0)
    apart = []
    for turn, samples in enumerate(work.samples):
        past = work.past(turn)
        sequences = [np.concatenate([past, sample]) for sample in samples]
        alone = [jkv.TrajectoryTree.of([sequence]) for sequence in sequences]
        zeros = np.zeros((len(samples), len(past)), np.float32)
        counted = np.concatenate([zeros, work.weights[turn]], axis=1)
        apart.append(Pass(_stack(alone), jnp.asarray(counted)))
    level, of_level = plant_one_level(work)
    return {
        TREE: [Pass(_stack([tree]), weights[None])],
        PARTS: [Pass(parts.tree, jnp.where(parts.is_first, of_parts, 0.0))],
        LEVEL: [Pass(_stack([level]), of_level[None])],
        APART: apart,
    }


def _stack(trees: list[jkv.TrajectoryTree]) -> jkv.TrajectoryTree:
    return jax.tree.map(lambda *each: jnp.stack(each), *trees)


def add_up(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the sum of a function of trees over all passes."""

    def run(params: Any, passes: list[Pass]) -> Any:
        def add(total: Any, one: Pass) -> Any:
            found = function(params, one.trees, one.weights)
            return jax.tree.map(jnp.add, total, found), None

        # A single call needs no accumulator.
        if len(passes) == 1 and len(passes[0].weights) == 1:
            only = jax.tree.map(lambda each: each[0], passes[0])
            return function(params, only.trees, only.weights)
        shapes = jax.eval_shape(
            function, params, *jax.tree.map(lambda each: each[0], passes[0])
        )
        total = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), shapes)
        for each in passes:
            total, _ = jax.lax.scan(add, total, each)
        return total

    return run


def make_cases(shapes: Shapes, passes: dict[str, list[Pass]]) -> list[Case]:
    """Return a case for each contender, forward and with the gradient."""
    rng = np.random.default_rng(1)

    def draw(leaf: Any) -> jax.Array:
        scale = leaf.shape[0] ** -0.5
        return jnp.asarray(scale * rng.standard_normal(leaf.shape, np.float32))

    params = jax.tree.map(draw, describe_weights(shapes))
    loss = functools.partial(weigh, make_score(shapes))
    kinds = {"forward": loss, "gradient": jax.grad(loss)}
    expected: dict[str, Any] = {}
    cases = []
    for name, each in passes.items():
        for kind, function in kinds.items():
            program = jax.jit(add_up(function)).lower(params, each).compile()
            memory = program.memory_analysis().temp_size_in_bytes
            rows = sum(one.weights.size for one in each)
            labels = {"contender": name, "kind": kind, "rows": rows, "MB": memory / 1e6}
            cases.append(
                Case(
                    name=f"{name}, {kind}",
                    prepare=lambda each=each: (params, each),
                    run=functools.partial(_run, program),
                    check=functools.partial(_compare, expected, kind),
                    labels=labels,
                )
            )
            harness.progress(f"compiled: {name}, {kind}")
    return cases


def _run(function: Callable[..., Any], arguments: Any) -> Any:
    return jax.block_until_ready(function(*arguments))


def _compare(expected: dict[str, Any], kind: str, found: Any) -> None:
    """Raise unless all contenders return equal numbers."""
    found = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
    for one, other in zip(found, expected.setdefault(kind, found), strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(one, other, atol=1e-5 * scale, rtol=1e-5)


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=512, help="tokens; %(default)s")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--branches", type=int, default=8, help="in each turn")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--part", type=int, default=1536, help="most rows of a part")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="few tokens, to see that it runs"
    )
    options = parser.parse_args()
    if options.quick:
        options.prompt, options.turns, options.branches = 16, 2, 3
        options.length, options.part, options.rounds = 8, 32, 2
    shapes = Shapes(
        num_layers=options.layers, num_heads=8, num_kv_heads=4, hidden_dim=1024
    )
    where = harness.machine()
    print(harness.header("jkv: scoring a trajectory tree", where))
    work = draw_workload(
        options.prompt, options.turns, options.branches, options.length
    )
    cases = make_cases(shapes, list_passes(work, options.part))
    samples = harness.interleave(cases, rounds=options.rounds, warmup=1)
    rows: list[dict[str, Any]] = []
    for case in cases:
        row: dict[str, Any] = {**case.labels, **samples[case.name].row(1.0)}
        of_tree = samples[f"{TREE}, {case.labels['kind']}"]
        row["times the tree"] = samples[case.name].ratio_to(of_tree)
        row["aim"] = AIMS.get(case.labels["contender"])
        rows.append(row)
    where["load after"] = harness.machine()["load"]
    print("\nseconds\n" + harness.table(rows, {key: key for key in rows[0]}))
    if not options.quick:
        names = "prompt", "turns", "branches", "length", "part", "layers"
        sizes = {key: getattr(options, key) for key in names}
        run = {"benchmark": "trees", "machine": where, "sizes": sizes, "unit": "s"}
        harness.save(RESULTS, run | {"rows": rows})
        print(f"\nwritten to {RESULTS.name}")


if __name__ == "__main__":
    main()
