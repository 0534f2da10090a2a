"""Compile a model's step for MI300X with XLA's ROCm compiler, without an AMD GPU.

For one GPU, and for a mesh of eight: decode steps, and steps that verify draft tokens
or compute prompt chunks. A step with a model's number of layers (append, then write and
attend in each, with a donated cache) is compiled ahead of time. Checks on the compiled
module: temporary memory, operations as large as a pool, presence of the kernels,
in-place update of every cache array; on a mesh also each GPU's share and the
collectives. Nothing runs or is timed. The compiler is JAX's ROCm plugin with stubs for
ROCm (`rocm_stand_in.py`).

    python benchmarks/rocm_compile.py            # downloads 160 MB the first time
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
import time
import unittest.mock
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rocm_stand_in
from launches import find_launches

import jkv

HERE = pathlib.Path(__file__).parent
# Allowed operations on arrays as large as a layer of the pool.
IN_PLACE = {
    "bitcast",
    "call",
    "custom-call",
    "fusion",  # its operations are listed, too
    "get-tuple-element",
    "parameter",
    "scatter",
    "tuple",
    "while",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step: one token per sequence, or several."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_sequences: int
    max_context_length: int
    num_blocks: int
    dtype: str
    is_scanned: bool  # layers in a loop, or unrolled
    value_dtype: str | None = None
    block_size: int = 16  # tokens of a block on each GPU
    heads: int = 1  # GPUs over which the heads are sharded
    context: int = 1  # GPUs over which each block's tokens are sharded
    sliding_window: int | None = None  # of the cache
    window: int | None = None  # of each layer, as a traced number
    num_rows: int | None = None  # of a step with prompt chunks
    latent_value_dim: int | None = None  # of a latent cache
    # Percent of the GPU's memory that XLA plans with, None for its default 95. It
    # counts a pool again for each in-place operation, and recomputes in each layer what
    # exceeds that count.
    memory_percent: int | None = None
    # True if a kernel launch computes queries from the previous output, like
    # projections.
    is_projected: bool = False

    @property
    def num_cards(self) -> int:
        return self.heads * self.context

    def spread(self, devices: list[jax.Device]) -> tuple[Any, Any, Any]:
        """Return shardings of the cache, of replicated arrays and of rows by heads."""
        shape = self.heads, self.context
        mesh = jax.sharding.Mesh(
            np.array(devices[: self.num_cards]).reshape(shape),
            ("tp", "cp"),
            (jax.sharding.AxisType.Auto,) * 2,
        )
        specs = jkv.partition_specs(self.config(), mesh=mesh, heads="tp", context="cp")
        lie_on = functools.partial(jax.sharding.NamedSharding, mesh)
        spec = jax.sharding.PartitionSpec
        return jax.tree.map(lie_on, specs), lie_on(spec()), lie_on(spec(None, "tp"))

    def config(self) -> jkv.CacheConfig:
        return jkv.CacheConfig(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_blocks=self.num_blocks,
            block_size=self.block_size * self.context,
            max_sequences=self.num_sequences,
            max_context_length=self.max_context_length,
            dtype=self.dtype,
            value_dtype=self.value_dtype,
            sliding_window=self.sliding_window,
            value_head_dim=self.latent_value_dim,
            values_in_keys=self.latent_value_dim is not None,
        )

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self.num_sequences if self.num_rows is None else self.num_rows

    def run(
        self,
        cache: jkv.Cache,
        seq_ids: jax.Array,
        counts: jax.Array,
        rows: jax.Array,
        keys: jax.Array,
        values: jax.Array,
    ) -> tuple[jkv.Cache, jax.Array]:
        """Run a decode step; each layer's output is the next one's input."""
        if self.num_rows is None:
            cache, batch = jkv.append(cache, seq_ids)
        else:
            cache, batch = jkv.append(cache, seq_ids, counts, capacity=self.num_rows)

        def layer_step(
            layer: jax.Array | int, carry: tuple[jkv.Cache, jax.Array]
        ) -> tuple[jkv.Cache, jax.Array]:
            cache, rows = carry
            stored = None if self.latent_value_dim else values
            cache = jkv.write(cache, layer, batch, keys, stored)
            window = self.sliding_window
            if self.window is not None:  # a number per layer
                window = self.window + layer
            if self.is_projected:
                rows = rows + rows
            output = jkv.attend(cache, layer, batch, rows, window=window)
            missing = self.head_dim - output.shape[-1]  # nonzero only for latent caches
            return cache, jnp.pad(output, ((0, 0), (0, 0), (0, missing)))

        carry = cache, rows
        if self.is_scanned:
            # The loop counter is the layer: slicing a scanned array would launch
            # another kernel.
            carry = jax.lax.fori_loop(0, self.num_layers, layer_step, carry)
        else:
            for number in range(self.num_layers):
                carry = layer_step(number, carry)
        cache, rows = carry
        return jkv.commit(cache, batch), rows

    def lower(self, devices: list[jax.Device]) -> tuple[jax.stages.Lowered, jkv.Cache]:
        """Return the lowered step with donation, and the shapes of its cache."""
        of_cache, everywhere, by_heads = self.spread(devices)
        cache = jax.eval_shape(lambda: jkv.init(self.config()))
        (storage,), (of_storage,) = cache.storage, of_cache.storage
        storage = dataclasses.replace(storage, sharding=of_storage.sharding)
        cache = cache.with_storage((storage,))
        dtype = jnp.bfloat16 if storage.key_scales is not None else self.dtype
        rows, keys = (
            jax.ShapeDtypeStruct((self.rows, heads, self.head_dim), dtype)
            for heads in (self.num_heads, self.num_kv_heads)
        )
        seq_ids = jax.ShapeDtypeStruct((self.num_sequences,), jnp.int32)
        operands = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            (cache, seq_ids, seq_ids, rows, keys, keys),
            (of_cache, everywhere, everywhere, by_heads, by_heads, by_heads),
        )
        return jax.jit(self.run, donate_argnums=0).trace(*operands).lower(), cache


# Shapes of Llama 3 8B: 64 sequences of up to 8,192 tokens, 64 GiB of cache.
LLAMA = Step(
    name="llama-8b, scan",
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_sequences=64,
    max_context_length=8192,
    num_blocks=32768,
    dtype="bfloat16",
    is_scanned=True,
)
STEPS = [
    LLAMA,
    dataclasses.replace(LLAMA, name="llama-8b, unrolled", is_scanned=False),
    dataclasses.replace(
        LLAMA,
        name="llama-8b, unrolled, nothing computed anew",
        is_scanned=False,
        memory_percent=400,
    ),
    dataclasses.replace(LLAMA, name="llama-8b, projected", is_projected=True),
    dataclasses.replace(LLAMA, name="float16", num_layers=4, dtype="float16"),
    dataclasses.replace(
        LLAMA, name="float32", num_layers=4, num_blocks=8192, dtype="float32"
    ),
    dataclasses.replace(LLAMA, name="llama-8b, int8", dtype="int8"),
    dataclasses.replace(
        LLAMA, name="llama-8b, int4 values", dtype="int8", value_dtype="int4"
    ),
    dataclasses.replace(LLAMA, name="fp8", num_layers=4, dtype="float8_e4m3fn"),
    # Layers with different windows on full caches; a cache that releases blocks; draft
    # tokens to verify; prompt chunks in a decode step.
    dataclasses.replace(LLAMA, name="llama-8b, windows", window=1024),
    dataclasses.replace(LLAMA, name="llama-8b, sliding window", sliding_window=1024),
    dataclasses.replace(LLAMA, name="llama-8b, 5 rows each", num_rows=5 * 64),
    dataclasses.replace(
        LLAMA, name="llama-8b, chunks, windows", num_rows=2048, window=1024
    ),
    # Shapes of DeepSeek V3's attention.
    dataclasses.replace(
        LLAMA,
        name="latent, 128 heads",
        num_layers=61,
        num_heads=128,
        num_kv_heads=1,
        head_dim=576,
        latent_value_dim=512,
    ),
    dataclasses.replace(LLAMA, name="llama-8b, heads on 8 cards", heads=8),
    # Four times the tokens, and contexts sixteen times as long.
    dataclasses.replace(
        LLAMA,
        name="llama-8b, blocks on 8 cards",
        context=8,
        num_sequences=16,
        max_context_length=131072,
        num_blocks=16384,
    ),
    dataclasses.replace(
        LLAMA,
        name="llama-8b, heads on 4 cards, blocks on 2, int8",
        heads=4,
        context=2,
        num_blocks=65536,
        dtype="int8",
    ),
]
# Collectives between GPUs.
COLLECTIVE = re.compile(
    r"= (.+?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|"
    r"collective-broadcast)(?:-start)?\("
)


def compile_step(step: Step, devices: list[jax.Device]) -> dict[str, object]:
    """Compile a step and check that it updates the cache in place."""
    start = time.perf_counter()
    lowered, cache = step.lower(devices)
    (storage,) = cache.storage
    planned = {"xla_gpu_memory_limit_slop_factor": step.memory_percent}
    compiled = lowered.compile(planned if step.memory_percent else None)
    seconds = time.perf_counter() - start

    text, memory = compiled.as_text(), compiled.memory_analysis()
    num_kernels = len(re.findall(r"custom-call\(.*triton", text))
    # Attention pieces and their combination; with several rows per request two kernels,
    # and one that stores rows if there are several arrays.
    expected = 2 if step.num_rows is None else 4
    expected += len(storage.arrays) > 1
    expected *= 1 if step.is_scanned else step.num_layers
    assert num_kernels == expected, f"{num_kernels} kernels in the module"
    launches = count_launches(text)
    if launches is not None:
        assert launches["bookkeeping"] == 0, f"lists are made in each layer: {launches}"
    else:
        assert count_entry(text) < expected + 48, "lists are made in each layer"
    layer_elements = storage.key_pool.size // step.num_layers // step.num_cards
    for line in text.splitlines():
        match = re.search(r"= (.+?) ([\w-]+)\(", line)
        if match is None or match[2] in IN_PLACE:
            continue
        for shape in re.findall(r"\w+\[([\d,]+)\]", match[1]):
            size = np.prod([int(n) for n in shape.split(",")])
            assert size < layer_elements, f"a copy of a layer or more: {line}"
    pool_bytes = sum(x.size * x.dtype.itemsize for x in storage.arrays.values())
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    storage_bytes = pool_bytes // step.num_cards
    cache_bytes -= pool_bytes - storage_bytes  # metadata is replicated
    crossing = sorted(
        f"{name} {re.sub('{.*?}', '', kind)}" for kind, name in COLLECTIVE.findall(text)
    )
    # One for the maxima, one for totals and weighted values.
    assert len(crossing) == (2 if step.context > 1 else 0), crossing
    assert memory.temp_size_in_bytes < storage_bytes / step.num_layers / 4
    assert memory.alias_size_in_bytes >= cache_bytes, "not updated in place"
    return {
        "step": step.name,
        "layers": step.num_layers,
        "dtype": step.dtype,
        "cards": step.num_cards,
        "collectives": crossing,
        "pool bytes": storage_bytes,
        "temporary bytes": memory.temp_size_in_bytes,
        "aliased bytes": memory.alias_size_in_bytes,
        "output bytes": memory.output_size_in_bytes,
        "kernels": num_kernels,
        "launches a layer": launches,
        "launches outside of loops": count_entry(text),
        "seconds to compile": round(seconds, 1),
    }


def count_entry(text: str) -> int:
    """Count the launches outside the loop, or of all layers without a loop."""
    entry = text[text.index("\nENTRY ") :]
    return len(re.findall(r" (?:fusion|custom-call)\(", entry))


def count_launches(text: str) -> dict[str, int] | None:
    """Count the launches per trip of the loop over layers; None without a loop.

    By purpose: attention kernels, pool writes, attention bookkeeping, combination
    across GPUs, and the rest (the loop counter). Collectives are counted separately.
    """
    lines = find_launches(text)
    if lines is None:
        return None
    counts = dict.fromkeys(("kernels", "writes", "bookkeeping", "joining", "loop"), 0)
    for line in lines:
        name = re.search(r'op_name="([^"]*)"', line)
        path = name[1] if name else ""
        if "_write" in path:
            counts["writes"] += 1
        elif " custom-call(" in line:
            counts["kernels"] += 1
        elif "attend_differentiably" in path:
            counts["bookkeeping"] += 1
        elif "_attend_on_device" in path or "all-reduce" in line:
            counts["joining"] += 1
        else:
            counts["loop"] += 1
    return counts


@contextlib.contextmanager
def pretend_mi300x() -> Iterator[None]:
    """Tune the kernel for the target GPU."""
    found = {"rocm": "gfx942"}
    with unittest.mock.patch("jkv.attention.backend.find_target", found.get):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=HERE / "out/rocm")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if not arguments.inside:
        # The dynamic loader reads its path at process start.
        variables = os.environ | rocm_stand_in.prepare(folder)
        again = [sys.executable, __file__, "--inside", "--folder", str(folder)]
        os.execve(sys.executable, again, variables)

    devices = rocm_stand_in.mi300x(folder, max(step.num_cards for step in STEPS))
    print(f"JAX {jax.__version__}, {devices[0].device_kind}, nothing runs")
    results = []
    with pretend_mi300x():
        for step in STEPS:
            results.append(compile_step(step, devices))
            print(json.dumps(results[-1]))
    out = HERE / "results" / "rocm_compile.json"
    run = {"jax": jax.__version__, "target": "MI300X (gfx942)", "steps": results}
    out.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
