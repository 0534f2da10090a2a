"""Attention workloads of `gpu.py` and `tiles.py`, with several calls per program.

A model's step has one call per layer, so a program has several calls, over as many
layers as exceed the last-level cache of any GPU, the 256 MB of an MI300X. The queries
of a call are the previous call's output, as in a model, so that calls do not overlap.
The host launches programs rather than calls, and its time does not count.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from harness import Case

import jkv
from jkv.attention import choice
from jkv.attention.backend import Requests, StepShape
from jkv.formats.format import name_parts
from jkv.verbs.attending import pools_of

BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 64, 128, 32, 8
LATENT_DIM, LATENT_VALUE_DIM = 576, 512
MAX_CALLS = 16  # per program
PROGRAM_BYTES = 8e9  # approximate bytes that a program reads
SAMPLE_BYTES = 6e10  # approximate bytes that a sample reads, some 30 ms
SAMPLE_OPERATIONS = 1e13  # likewise for prompts
POOL_BYTES = 2**28  # least size of all layers
PATTERN = 64  # random blocks, repeated to fill the pool


class Workload(NamedTuple):
    """Sequences that decode one token each, or whole prompts."""

    lengths: tuple[int, ...]
    is_prefill: bool = False
    is_latent: bool = False
    dtype: str = "bfloat16"  # as in `CacheConfig`
    value_dtype: str | None = None  # as in `CacheConfig`
    num_heads: int = NUM_HEADS
    head_dim: int = HEAD_DIM
    block_size: int = BLOCK_SIZE
    calls: int | None = None  # per program; None for a program of about `PROGRAM_BYTES`
    forks: int = 1  # sequences that share three quarters of their tokens
    reads_once: bool = False  # use shared-prefix attention

    @property
    def label(self) -> str:
        """Batch and context in words."""
        low, high = min(self.lengths), max(self.lengths)
        context = f"{high:,}" if low == high else f"{low:,} to {high:,}"
        words = [f"{len(self.lengths)} x {context}", self.dtype]
        words += [f"{self.value_dtype} values"] if self.value_dtype else []
        words += ["prefill"] if self.is_prefill else []
        words += ["latent"] if self.is_latent else []
        usual = (LATENT_DIM if self.is_latent else HEAD_DIM, NUM_HEADS)
        if (self.dim, self.num_heads) != usual:
            words += [f"head dim {self.dim}, {self.num_heads} heads"]
        if self.block_size != BLOCK_SIZE:
            words += [f"blocks of {self.block_size}"]
        if self.forks > 1:
            words += [f"{self.forks} forks of each prompt"]
        words += ["read once"] if self.reads_once else []
        return ", ".join(words)

    @property
    def dim(self) -> int:
        """Head dim of queries and keys."""
        return LATENT_DIM if self.is_latent else self.head_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and scales that a call reads."""
        return sum(self.lengths) * self._config(1).bytes_per_token

    @property
    def num_operations(self) -> int:
        """Floating-point operations of a prefill call."""
        pairs = sum(n * (n + 1) // 2 for n in self.lengths)
        value_dim = LATENT_VALUE_DIM if self.is_latent else self.dim
        return 2 * self.num_heads * (self.dim + value_dim) * pairs

    @property
    def num_layers(self) -> int:
        """Layers over which the calls of a program cycle."""
        return min(self.num_calls, 1 + POOL_BYTES // self.num_bytes)

    @property
    def num_calls(self) -> int:
        """Calls in a program."""
        if self.calls is not None:
            return self.calls
        if self.is_prefill:
            return 4
        calls = min(MAX_CALLS, max(2, int(PROGRAM_BYTES / self.num_bytes)))
        return max(calls, 1 + POOL_BYTES // self.num_bytes)

    @property
    def num_rows(self) -> int:
        """Query rows of a call."""
        return sum(self.lengths) if self.is_prefill else len(self.lengths)

    @property
    def config(self) -> jkv.CacheConfig:
        """A cache of exactly this size, in all layers."""
        return self._config(self.num_layers)

    def _config(self, num_layers: int) -> jkv.CacheConfig:
        layout: dict[str, Any] = dict(num_kv_heads=NUM_KV_HEADS, head_dim=self.head_dim)
        if self.is_latent:
            layout = dict(
                num_kv_heads=1,
                head_dim=LATENT_DIM,
                value_head_dim=LATENT_VALUE_DIM,
                values_in_keys=True,
            )
        return jkv.CacheConfig(
            num_layers=num_layers,
            num_blocks=sum(-(-n // self.block_size) for n in self.lengths),
            block_size=self.block_size,
            max_sequences=len(self.lengths),
            max_context_length=max(self.lengths),
            dtype=self.dtype,
            value_dtype=self.value_dtype,
            **layout,
        )


class Operands(NamedTuple):
    """Operands of a program's calls."""

    queries: jax.Array  # bf16 or f32[R, H, D], of the first call
    storage: dict[str, jax.Array]  # of a cache; random blocks in random order
    tables: jax.Array  # i32[B, M]
    lengths: jax.Array  # i32[B]
    plan: dict[str, Any] | None = None  # the plan of `append`


# Attention of the queries in a layer.
Attend = Callable[[jax.Array, Operands, int], jax.Array]


def make_operands(
    workload: Workload, draw: Callable[[], Any] | None = None
) -> Operands:
    """Return random queries, pools and tables; `draw` is a compiled `draw_arrays`."""
    blocks = [-(-n // workload.block_size) for n in workload.lengths]
    order = np.random.default_rng(0).permutation(sum(blocks))
    tables = np.zeros((len(blocks), max(blocks)), np.int32)
    start = 0
    for row, num in enumerate(blocks):
        tables[row, :num] = order[start : start + num]
        start += num
        common = 3 * num // 4
        tables[row, :common] = tables[row - row % workload.forks, :common]
    queries, storage = draw() if draw else draw_arrays(workload)
    return Operands(
        queries,
        storage,
        jnp.asarray(tables),
        jnp.array(workload.lengths, jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=0)
def draw_arrays(
    workload: Workload,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the first call's queries, and pools of repeated random blocks."""
    return _draw_queries(workload), _draw_pools(workload)


def _draw_queries(workload: Workload) -> jax.Array:
    shape = workload.num_rows, workload.num_heads, workload.dim
    dtype = jnp.float32 if workload.dtype == "float32" else jnp.bfloat16
    return jax.random.normal(jax.random.key(1), shape, dtype)


def shape_operands(workload: Workload) -> Operands:
    """Return the shapes of the operands, for compilation."""
    batch = len(workload.lengths)
    blocks = -(-max(workload.lengths) // workload.block_size)
    cache = jax.eval_shape(functools.partial(jkv.init, workload.config))
    return Operands(
        jax.eval_shape(functools.partial(_draw_queries, workload)),
        cache.storage[0].arrays,
        jax.ShapeDtypeStruct((batch, blocks), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


def _draw_pools(workload: Workload) -> dict[str, jax.Array]:
    shapes = shape_operands(workload).storage
    _, num_blocks, *shape, _ = shapes["key_pool"].shape
    rows = jax.random.normal(jax.random.key(0), (2, PATTERN, *shape, workload.dim))
    filled = {}
    for name, kept, each in zip(
        ("key", "value"), workload.config.sizes.formats, rows, strict=True
    ):
        filled |= name_parts(name, kept.put(kept.prepare(each)))
    chosen = jnp.arange(num_blocks) % PATTERN
    return {
        name: jnp.broadcast_to(filled[name][chosen], shape.shape)
        for name, shape in shapes.items()
    }


def attend_by_jkv(
    workload: Workload,
    implementation: str | None,
    queries: jax.Array,
    operands: Operands,
    layer: int,
) -> jax.Array:
    """Call `jkv.paged_attention`."""
    storage, lengths = operands.storage, operands.lengths
    starts, counts = cut_rows(workload, lengths)
    return jkv.paged_attention(
        queries,
        storage["key_pool"],
        storage.get("value_pool"),
        layer,
        operands.tables,
        None,
        starts,
        counts,
        lengths,
        implementation=implementation,
        kv_dtype=workload.config.dtype,
        value_dtype=workload.value_dtype,
        value_head_dim=LATENT_VALUE_DIM if workload.is_latent else None,
        key_scales=storage.get("key_scales"),
        value_scales=storage.get("value_scales"),
        max_query_length=None if workload.is_prefill else 1,
        work_lists=operands.plan,
    )


def plan_step(workload: Workload, operands: Operands) -> dict[str, Any]:
    """Return the plan of `append` for a decode step of these sequences."""
    (storage,) = jax.eval_shape(functools.partial(jkv.init, workload.config)).storage
    tables, lengths, batch = operands.tables, operands.lengths, len(workload.lengths)
    starts, counts = cut_rows(workload, lengths)
    used = -(-lengths // workload.block_size)
    columns = jnp.arange(tables.shape[1], dtype=jnp.int32)[None]
    is_used = (columns < used[:, None]).astype(jnp.int32)
    owners = jnp.zeros(storage.key_pool.shape[1], jnp.int32).at[tables].add(is_used)
    numbers = jnp.arange(batch, dtype=jnp.int32)
    step = StepShape(
        num_rows=batch,
        is_decoding=True,
        by_position=False,
        num_kv_heads=storage.key_pool.shape[2],
        part_size=workload.block_size,
        num_parts=1,
        window=None,
    )
    requests = Requests(tables, numbers, starts, counts, lengths)
    return choice.plan(pools_of(storage), requests, owners, step)


def cut_rows(workload: Workload, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each request's first row and row count, i32[B]."""
    counts = lengths if workload.is_prefill else jnp.ones_like(lengths)
    return jnp.cumsum(counts, dtype=jnp.int32) - counts, counts


def attend_by_jax(
    tokens: int, queries: jax.Array, operands: Operands, layer: int
) -> jax.Array:
    """Call JAX's paged attention, in its own layout of keys and values.

    Each layer is a separate array, [K, N, T, D], and queries must be scaled. It
    processes blocks of `tokens` tokens at a time.
    """
    from jax.experimental.pallas.ops.gpu import paged_attention

    blocks = max(1, tokens // operands.storage["key_pool"][layer].shape[2])
    return paged_attention.paged_attention(
        queries * queries.shape[-1] ** -0.5,
        operands.storage["key_pool"][layer],
        operands.storage["value_pool"][layer],
        operands.tables,
        operands.lengths,
        pages_per_compute_block=blocks,
        k_splits=max(1, min(16, operands.tables.shape[1] // blocks)),
    )


def make_program(workload: Workload, attend: Attend) -> Callable[[Operands], jax.Array]:
    """Return a function of all calls of a program, in sequence.

    Each call's queries are the previous output; for a latent cache, whose values are
    narrower, the remaining components stay the first call's.
    """

    def program(operands: Operands) -> jax.Array:
        if workload.reads_once:
            operands = operands._replace(plan=plan_step(workload, operands))
        first = queries = operands.queries
        for number in range(workload.num_calls):
            output = attend(queries, operands, number % workload.num_layers)
            rest = first[..., output.shape[-1] :]
            queries = output
            if rest.shape[-1]:
                queries = jnp.concatenate([output, rest], axis=-1)
        return queries

    return program


def compile_all(
    programs: Mapping[Any, tuple[Callable[..., Any], Sequence[Any]]],
) -> dict[Any, Any]:
    """Compile functions for shapes in threads; failures are returned as exceptions.

    Already jitted functions keep their options, such as donation.
    """

    def build(name: Any) -> Any:
        function, shapes = programs[name]
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        try:
            return jitted.lower(*shapes).compile()
        except Exception as error:  # a refusal is a result
            return error

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(programs, pool.map(build, programs), strict=True))


def make_case(
    name: str, workload: Workload, run_program: Callable[[], Any], *, few: bool = False
) -> Case:
    """Return a case that enqueues programs and waits for the last; one if `few`."""
    num_bytes = workload.num_bytes * workload.num_calls
    times = max(1, min(50, int(SAMPLE_BYTES / num_bytes)))
    if workload.is_prefill:
        operations = workload.num_operations * workload.num_calls
        times = max(1, min(50, int(SAMPLE_OPERATIONS / operations)))
    times = 1 if few else times

    def run(_: None) -> Any:
        for _ in range(times):
            result = run_program()
        return jax.block_until_ready(result)

    return Case(
        name=name,
        prepare=lambda: None,
        run=run,
        calls=times * workload.num_calls,
    )


def find_workloads(memory: float, quick: bool = False) -> list[Workload]:
    """Return prompts, then decode batches with pools of up to 60% of the memory."""
    if quick:
        prompts, batches, contexts = [64], {1: (64, 256), 4: (256,)}, (64, 256)
    else:
        prompts, contexts = [512, 2_048, 8_192, 32_768], (2_048, 8_192, 32_768)
        batches = {1: (2_048, 8_192, 32_768, 131_072), 8: (2_048, 32_768)}
        batches |= {64: (512, *contexts, 131_072), 256: (512, 2_048, 8_192)}
    usual, longest = contexts[-2], contexts[-1]
    some = max(batches) if quick else 64
    batch = (usual,) * some
    prefill = [Workload((n,), is_prefill=True) for n in prompts]
    prefill += [
        Workload((usual,), is_prefill=True, head_dim=256),
        Workload((usual,), is_prefill=True, is_latent=True),
        Workload((usual,), is_prefill=True, dtype="int8"),
        Workload((contexts[0],), is_prefill=True, dtype="float32"),
    ]
    found = [Workload((n,) * b) for b, lengths in batches.items() for n in lengths]
    unequal = tuple(np.geomspace(usual / 64, usual, some).astype(int).tolist())
    for dtype in ("bfloat16", "int8", "fp8"):
        found.append(Workload(unequal, dtype=dtype))
        found.append(Workload(batch, is_latent=True, dtype=dtype))
        if dtype != "bfloat16":
            found += [Workload((n,) * some, dtype=dtype) for n in contexts]
    found += [
        Workload((contexts[0],) * some, is_latent=True),
        Workload((longest,) * some, is_latent=True),
        Workload(batch, is_latent=True, num_heads=128),
        *(Workload(batch, head_dim=dim) for dim in (64, 256)),
        *(Workload(batch, block_size=size) for size in (16, 256)),
        Workload(batch, dtype="float32"),
        Workload(batch, dtype="int8", value_dtype="int4"),
        # Caching by the GPU for equal prompts, and shared-prefix attention.
        *(
            Workload((length,) * some, forks=forks, reads_once=once)
            for length in contexts[:2]
            for forks in (8, 64)
            for once in (False, True)
        ),
    ]
    fitting = {w for w in found if w.num_bytes * w.num_layers <= 0.6 * memory}
    if quick:  # pools may fit in the GPU's cache, with fewer calls
        fitting = {w._replace(calls=2) for w in fitting}
    return prefill + sorted(fitting, key=lambda w: (w.num_bytes, w))
