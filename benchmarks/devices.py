"""Communication between devices in a decode step, counted in compiled modules.

    python benchmarks/devices.py

A step of the decoder in `examples/pretrained`, with one layer, is compiled for 1, 2, 4
and 8 simulated devices; nothing runs or is timed. The table lists, for each kind of
sharding, the step's collectives with their result shapes, and the argument bytes per
device with its share of the weights and of the cache.
"""

import collections
import pathlib
import re
import sys
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jkv

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = pathlib.Path(__file__).parent / "results" / "devices.json"
sys.path.insert(0, str(ROOT / "examples"))  # the examples are not a package

import pretrained  # noqa: E402

NUM_DEVICES = (1, 2, 4, 8)
NUM_ROWS = 16  # sequences of a replica, one token each
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
}
KINDS = {
    "heads": "8 kv heads, spread",
    "few heads": "2 kv heads, each on several devices",
    "context": "tokens of each block, spread",
    "pools": "a pool for each",
}

COLLECTIVE = re.compile(
    r"= (.+?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|"
    r"collective-broadcast)(?:-start)?\("
)
ARRAY = re.compile(r"\b[a-z]+\d+\[[\d,]*\]")


class Step(NamedTuple):
    """A step compiled for some devices."""

    compiled: Any
    raw: dict[str, Any]  # the model's config.json
    config: jkv.CacheConfig  # of a device's pool, before sharding

    @property
    def collectives(self) -> collections.Counter[tuple[str, str]]:
        """Counts of the module's collectives, by name and result shape."""
        found = COLLECTIVE.findall(self.compiled.as_text())
        return collections.Counter(
            (name, " ".join(ARRAY.findall(kind))) for kind, name in found
        )

    @property
    def bytes_given(self) -> int:
        """Bytes of the arguments on each device."""
        return int(self.compiled.memory_analysis().argument_size_in_bytes)


def compile_step(kind: str, num_devices: int) -> Step:
    """Compile a step of one of `KINDS` for the first devices."""
    raw = MODEL | ({"num_key_value_heads": 2} if kind == "few heads" else {})
    config = pretrained.parse_config(raw)
    model = pretrained.Decoder(config)
    sizes = jkv.CacheConfig(
        num_blocks=256,
        max_sequences=NUM_ROWS,
        max_context_length=1024,
        dtype="float32",
        **model.cache_fields,
    )
    axis = {"context": "cp", "pools": "dp"}.get(kind, "tp")
    mesh = jax.sharding.Mesh(
        np.asarray(jax.devices()[:num_devices]), (axis,), axis_types=(AxisType.Auto,)
    )
    option = {"cp": "context", "dp": "pools", "tp": "heads"}[axis]
    where: dict[str, Any] = {"mesh": mesh, option: axis}
    shapes = jax.eval_shape(lambda: jkv.init(sizes, **where))
    cache = spread_shapes(mesh, shapes, jkv.partition_specs(sizes, **where))

    params = jax.eval_shape(
        lambda: pretrained.random_params(config, jax.random.key(0), jnp.float32)
    )

    def choose_spec(path: Any, leaf: Any) -> PartitionSpec:
        parts: list[str | None] = [None] * leaf.ndim
        divided = pretrained.find_divided_axis(
            config, path[-1].key, leaf.shape, num_devices
        )
        if axis == "tp" and divided is not None:
            parts[divided] = axis
        return PartitionSpec(*parts)

    specs = jax.tree_util.tree_map_with_path(choose_spec, params)
    params = spread_shapes(mesh, params, specs)
    ranks = (num_devices,) if axis == "dp" else ()
    spec = PartitionSpec(*ranks and (axis,))
    tokens = jax.ShapeDtypeStruct((*ranks, NUM_ROWS), jnp.int32)
    tokens = spread_shapes(mesh, tokens, spec)

    def take_step(
        params: Any, cache: jkv.Cache, tokens: jax.Array
    ) -> tuple[jkv.Cache, jax.Array]:
        def on_pool(cache: jkv.Cache, tokens: jax.Array) -> tuple[jkv.Cache, jax.Array]:
            cache, batch = jkv.append(cache, jnp.arange(NUM_ROWS, dtype=jnp.int32))
            logits, cache = model(params, tokens, cache, batch)
            return jkv.commit(cache, batch), jnp.argmax(logits, axis=-1)

        on_all = jkv.over_pools(on_pool) if ranks else on_pool
        return on_all(cache, tokens)

    lowered = jax.jit(take_step, donate_argnums=1).lower(params, cache, tokens)
    return Step(lowered.compile(), raw, sizes)


def spread_shapes(mesh: jax.sharding.Mesh, shapes: Any, specs: Any) -> Any:
    """Return shapes with the shardings of `specs`."""
    return jax.tree.map(
        lambda shape, spec: jax.ShapeDtypeStruct(
            shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec)
        ),
        shapes,
        specs,
    )


def describe(found: collections.Counter[tuple[str, str]]) -> str:
    """Format collectives for a table cell."""
    return ", ".join(
        f"{count} x {name} {kind}" for (name, kind), count in sorted(found.items())
    )


def make_rows() -> list[dict[str, Any]]:
    """Return a table row for each kind of sharding and number of devices."""
    rows = []
    for kind, text in KINDS.items():
        for count in NUM_DEVICES:
            step = compile_step(kind, count)
            rows.append(
                {
                    "placement": text,
                    "devices": count,
                    "collectives": describe(step.collectives) or "none",
                    "bytes_given": step.bytes_given,
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Compile all steps, print a Markdown table, and save the rows."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(NUM_DEVICES))
    rows = make_rows()
    print("| placement | devices | collectives of a layer's step | KiB given |")
    print("|---|---:|---|---:|")
    for row in rows:
        given = f"{row['bytes_given'] / 2**10:,.0f}"
        cells = row["placement"], row["devices"], row["collectives"], given
        print(f"| {' | '.join(map(str, cells))} |")
    run = {"benchmark": "devices", "machine": harness.machine(), "rows": rows}
    harness.save(RESULTS, run)


if __name__ == "__main__":
    main()
