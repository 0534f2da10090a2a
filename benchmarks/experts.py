"""Cost of an expert layer: tiles of one expert's rows, compared to `ragged_dot`.

    python benchmarks/experts.py [--rounds N]

A layer of 64 experts, 8 per token, with 512 components and 256 hidden units in float32,
for steps of 1, 64 and 1,024 rows with random experts. Both sort the rows by expert;
`examples/pretrained/experts.py` loops over tiles of 16 rows, the peer calls
`jax.lax.ragged_dot` three times. Their results are compared.
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

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = pathlib.Path(__file__).parent / "results" / "experts.json"
sys.path.insert(0, str(ROOT / "examples"))  # the examples are not a package

import pretrained  # noqa: E402  (found through the line above)
from pretrained import experts  # noqa: E402

NUM_ROWS = (1, 64, 1024)
SETTINGS = {
    "model_type": "qwen3_moe",
    "vocab_size": 8,
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
}
CONFIG = pretrained.parse_config(SETTINGS)


def in_tiles(weights: Any, x: jax.Array, chosen: Any, gates: Any) -> jax.Array:
    """Compute the layer as in the example."""
    valid, layer = jnp.ones(x.shape[0], bool), jnp.int32(0)
    return experts.apply_experts(CONFIG, weights, layer, x, chosen, gates, valid)


def ragged(weights: Any, x: jax.Array, chosen: Any, gates: Any) -> jax.Array:
    """Compute the layer by `jax.lax.ragged_dot`."""
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=CONFIG.experts.count)
    row = order // chosen.shape[1]

    def multiply(name: str, rows: jax.Array) -> jax.Array:
        matrices = weights[f"expert_{name}"][0]
        return jax.lax.ragged_dot(rows, matrices, sizes.astype(jnp.int32))

    gated = jax.nn.silu(multiply("gate", x[row])) * multiply("up", x[row])
    outputs = multiply("down", gated) * gates.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[row].add(outputs)


def make_cases(num_rows: int, params: Any) -> list[Case]:
    """Return both implementations for `num_rows` rows, and check that they agree."""
    x = jax.random.normal(jax.random.key(num_rows), (num_rows, CONFIG.hidden_size))
    chosen, gates = experts.route(
        CONFIG.experts, {n: w[0] for n, w in params.items()}, x
    )
    expected = np.asarray(ragged(params, x, chosen, gates))

    def case(contender: str, function: Callable[..., jax.Array]) -> Case:
        compiled = jax.jit(function).lower(params, x, chosen, gates).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
        return Case(
            name=f"{contender}, {num_rows}",
            prepare=lambda: None,
            run=lambda _: compiled(params, x, chosen, gates).block_until_ready(),
            check=lambda y: np.testing.assert_allclose(y, expected, atol=1e-4),
            labels={
                "rows": num_rows,
                "contender": contender,
                "temporary MiB": round(memory, 1),
            },
        )

    return [case("tiles", in_tiles), case("ragged_dot", ragged)]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    where = harness.machine()
    print(harness.header("An expert layer: tiles and ragged_dot", where))
    params = pretrained.random_params(CONFIG, jax.random.key(0), jnp.float32)
    (layers,) = params["layers"]
    cases = [case for rows in NUM_ROWS for case in make_cases(rows, layers)]
    samples = harness.interleave(cases, rounds=options.rounds)
    rows = [{**c.labels, **samples[c.name].row(1e3)} for c in cases]
    columns = {"rows": "rows", "contender": "", "temporary MiB": "temporary MiB"}
    spread = {"median": "median ms", "p10": "p10", "p90": "p90", "samples": "samples"}
    print("\n" + harness.table(rows, columns | spread))
    run = {"benchmark": "experts", "machine": where, "results": rows}
    harness.save(options.json, run)
    print(f"\nsaved in {options.json}")


if __name__ == "__main__":
    main()
