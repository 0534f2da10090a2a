"""The attention on a GPU: bandwidth of decoding, rate of prefill, beside its peers.

    python benchmarks/gpu.py [--quick]

One command of under ten minutes. First the kernel's tests, compiled for the card. Then
decoding over batches of 1 to 256 and contexts of 512 to 131,072 tokens, as far as a
pool fits in 60% of the memory, with 32 query and 8 kv heads of 128, in bfloat16, int8
and fp8, and with a latent cache (one kv head of 576, values its first 512); batches
whose lengths differ 100-fold; prefill of 512 to 8,192 tokens; a decode step of 32
layers with and without its bookkeeping. The floor is reading keys and values once:
fractions are of the bandwidth that a copy of 2 GiB reaches in the same run.

Peers, where they are installed: the plain path of jkv, JAX's own paged attention (it
keeps partial results in the queries' dtype), PyTorch's scaled-dot-product and flex
attention over contiguous keys and values of equal lengths. A peer that is absent or
refuses is listed with its reason. On a CPU a tiny run shows that the benchmark itself
works.
"""

import argparse
import functools
import importlib.util
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import Case

import jkv
from jkv.storage import quantization

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = pathlib.Path(__file__).parent / "results" / "gpu.json"
PLOT = ROOT / "docs" / "decode_bandwidth.png"
BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 64, 128, 32, 8
LATENT_DIM, LATENT_VALUE_DIM = 576, 512
CALLS = 10  # enqueued together in a sample, so that the host does not count
NUM_LAYERS = 32
COMPILED_BATCH = 64  # of the peer that takes long to compile


class Shape(NamedTuple):
    """A batch of decoding sequences."""

    lengths: tuple[int, ...]
    is_latent: bool = False
    dtype: str = "bfloat16"  # as `CacheConfig` takes it

    @property
    def config(self) -> jkv.CacheConfig:
        """A cache of one layer that holds just this."""
        layout: dict[str, Any] = dict(num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM)
        if self.is_latent:
            layout = dict(
                num_kv_heads=1,
                head_dim=LATENT_DIM,
                value_head_dim=LATENT_VALUE_DIM,
                values_in_keys=True,
            )
        return jkv.CacheConfig(
            num_layers=1,
            num_blocks=sum(-(-n // BLOCK_SIZE) for n in self.lengths),
            block_size=BLOCK_SIZE,
            max_sequences=len(self.lengths),
            max_context_length=max(self.lengths),
            dtype=self.dtype,
            **layout,
        )

    @property
    def label(self) -> str:
        """Batch and context in words."""
        low, high = min(self.lengths), max(self.lengths)
        context = f"{high:,}" if low == high else f"{low:,} to {high:,}"
        kind = ", latent" if self.is_latent else ""
        return f"{len(self.lengths)} x {context}{kind}, {self.dtype}"

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and scales that a call must read."""
        return sum(self.lengths) * self.config.bytes_per_token


def decode_shapes(memory: int, quick: bool) -> list[Shape]:
    """Return the batches whose pool fits 60% of the memory."""
    batches, contexts = (1, 4, 16, 64, 256), (512, 2_048, 8_192, 32_768, 131_072)
    if quick:
        batches, contexts = (1, 4), (64, 256)
    shapes = [Shape((n,) * b) for b in batches for n in contexts]
    shapes += [Shape((n,) * b, is_latent=True) for b in batches[-2:] for n in contexts]
    longest = contexts[2] if not quick else contexts[-1]
    unequal = np.geomspace(longest / 100, longest, batches[-2]).astype(int)
    shapes.append(Shape(tuple(unequal.tolist())))
    for dtype in ("int8", "fp8"):
        shapes += [Shape((n,) * batches[-2], dtype=dtype) for n in contexts]
        shapes.append(Shape(tuple(unequal.tolist()), dtype=dtype))
        shapes.append(Shape((longest,) * batches[-2], is_latent=True, dtype=dtype))
    return [shape for shape in shapes if shape.num_bytes <= 0.6 * memory]


class Operands(NamedTuple):
    """What a decode call takes: random blocks in random order."""

    queries: jax.Array
    cache: jkv.Cache  # one layer; its tables are not used
    tables: jax.Array
    lengths: jax.Array


def make_operands(shape: Shape) -> Operands:
    """Return operands; the queries are bfloat16."""
    blocks = [-(-n // BLOCK_SIZE) for n in shape.lengths]
    order = np.random.default_rng(0).permutation(sum(blocks))
    tables = np.zeros((len(blocks), max(blocks)), np.int32)
    start = 0
    for row, num in enumerate(blocks):
        tables[row, :num] = order[start : start + num]
        start += num
    cache = jkv.init(shape.config)
    queries = jax.random.normal(
        jax.random.key(1), (len(blocks), NUM_HEADS, cache.head_dim), jnp.bfloat16
    )
    lengths = jnp.array(shape.lengths, jnp.int32)
    return Operands(queries, fill(cache), jnp.asarray(tables), lengths)


@functools.partial(jax.jit, donate_argnums=0)
def fill(cache: jkv.Cache) -> jkv.Cache:
    """Write random rows into every slot, a block of each head at a time."""

    def fill_block(block: jax.Array, cache: jkv.Cache) -> jkv.Cache:
        shape = (cache.num_kv_heads, cache.block_size, cache.head_dim)
        rows = jax.random.normal(jax.random.key(block), shape)
        elements, scales = quantization.quantise(rows, cache.dtype)
        written = {"keys": elements, "values": elements[..., : cache.value_head_dim]}
        if scales is not None:
            written |= {"key_scales": scales, "value_scales": scales}
        return cache.with_storage(
            {k: a.at[0, block].set(written[k]) for k, a in cache.storage.items()}
        )

    return jax.lax.fori_loop(jnp.int32(0), cache.num_blocks, fill_block, cache)


def jkv_call(implementation: str | None, operands: Operands) -> Callable[[], Any]:
    """Return a call of jkv's attention."""
    cache = operands.cache
    ones = jnp.ones_like(operands.lengths)
    attend = jax.jit(
        functools.partial(
            jkv.paged_attention,
            implementation=implementation,
            kv_dtype=cache.dtype,
            value_head_dim=cache.latent_value_dim,
            max_query_length=1,
        )
    )
    starts = jnp.arange(len(ones), dtype=jnp.int32)
    return functools.partial(
        attend,
        operands.queries,
        cache.keys,
        cache.values,
        0,
        operands.tables,
        None,
        starts,
        ones,
        operands.lengths,
        key_scales=cache.key_scales,
        value_scales=cache.value_scales,
    )


def jax_call(operands: Operands) -> Callable[[], Any]:
    """Return a call of the paged attention that comes with JAX."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention
    cache = operands.cache
    if cache.values is None or cache.dtype != jnp.bfloat16:
        raise NotImplementedError("measured in bfloat16, keys and values apart")
    # Its pools are [K, N, T, D], and it wants queries scaled.
    keys, values = (
        jax.lax.bitcast_convert_type(pool[0].swapaxes(0, 1), jnp.bfloat16)
        for pool in (cache.keys, cache.values)
    )
    scaled = operands.queries * operands.queries.shape[-1] ** -0.5
    attend = jax.jit(paged_attention.paged_attention)
    return functools.partial(
        attend, scaled, keys, values, operands.tables, operands.lengths
    )


def torch_call(compiled: bool, operands: Operands) -> Callable[[], Any]:
    """Return a call of PyTorch's attention over contiguous keys and values.

    Args:
      compiled: flex attention through `torch.compile`, else scaled-dot-product.
      operands: their shapes count.
    """
    if importlib.util.find_spec("torch") is None:
        raise NotImplementedError("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise NotImplementedError("torch has no GPU here")
    lengths, cache = set(operands.lengths.tolist()), operands.cache
    if len(lengths) > 1 or cache.values is None or cache.dtype != jnp.bfloat16:
        raise NotImplementedError("only equal lengths, bfloat16, keys and values apart")
    batch, (length,) = operands.queries.shape[0], lengths
    if compiled and batch != COMPILED_BATCH:
        raise NotImplementedError(
            f"it compiles for every shape: measured at batch {COMPILED_BATCH} only"
        )
    shape = (batch, NUM_KV_HEADS, length, HEAD_DIM)
    keys, values = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv"
    )
    queries = torch.randn(
        (batch, NUM_HEADS, 1, HEAD_DIM), device="cuda", dtype=torch.bfloat16
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    if compiled:
        from torch.nn.attention.flex_attention import flex_attention

        attend = torch.compile(flex_attention)
    return functools.partial(attend, queries, keys, values, enable_gqa=True)


PEERS: dict[str, Callable[[Operands], Callable[[], Any]]] = {
    "jkv": functools.partial(jkv_call, None),
    "jkv, plain path": functools.partial(jkv_call, "xla"),
    "jax.experimental paged_attention": jax_call,
    "torch scaled_dot_product_attention": functools.partial(torch_call, False),
    "torch flex_attention": functools.partial(torch_call, True),
}


def make_case(name: str, call: Callable[[], Any], labels: dict[str, Any]) -> Case:
    """Enqueue some calls and wait for the last."""

    def run(_: None) -> Any:
        for _ in range(CALLS):
            result = call()
        if hasattr(result, "block_until_ready"):
            return result.block_until_ready()
        import torch

        torch.cuda.synchronize()
        return result

    return Case(name=name, prepare=lambda: None, run=run, calls=CALLS, labels=labels)


def measure_decode(shape: Shape, rounds: int, copied: float) -> list[dict[str, Any]]:
    """Return a row per peer, absent ones with their reason."""
    operands = make_operands(shape)
    cases, rows = [], []
    for who, prepare in PEERS.items():
        labels = {"batch x context": shape.label, "who": who}
        try:
            call = prepare(operands)
            jax.block_until_ready(call())
            cases.append(make_case(who, call, labels))
        except Exception as error:  # a peer's refusal is a result, whatever its type
            rows.append({**labels, "refused": f"{type(error).__name__}: {error}"[:200]})
    if not cases:
        return rows
    samples = harness.interleave(cases, rounds=rounds, warmup=1)
    for case in cases:
        taken = samples[case.name]
        reached = shape.num_bytes / taken.median
        rows.append(
            {
                **case.labels,
                **taken.row(),
                "GB/s": reached / 1e9,
                "of a copy": reached / copied,
                "ratio": taken.ratio_to(samples["jkv"]) if "jkv" in samples else None,
                "bytes": shape.num_bytes,
            }
        )
    return rows


def measure_prefill(lengths: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Return time and rate of causal attention of whole prompts."""
    rows = []
    for length in lengths:
        operands = make_operands(Shape((length,)))
        queries = jax.random.normal(
            jax.random.key(2), (length, NUM_HEADS, HEAD_DIM), jnp.bfloat16
        )
        integers = [jnp.array([n], jnp.int32) for n in (0, length, length)]
        cases, cache = [], operands.cache
        for implementation in (None, "xla"):
            attend = jax.jit(
                functools.partial(
                    jkv.paged_attention,
                    implementation=implementation,
                    kv_dtype=cache.dtype,
                )
            )
            pools = (cache.keys, cache.values, 0, operands.tables, None)
            call = functools.partial(attend, queries, *pools, *integers)
            cases.append(make_case(implementation or "jkv", call, {}))
        pairs = length * (length + 1) // 2
        operations = 4 * NUM_HEADS * HEAD_DIM * pairs
        for name, taken in harness.interleave(cases, rounds=rounds, warmup=1).items():
            rate = operations / taken.median / 1e12
            rows.append({"prompt": length, "who": name, **taken.row(), "TFLOP/s": rate})
    return rows


def measure_step(batch: int, context: int, rounds: int) -> list[dict[str, Any]]:
    """Return a decode step of all layers, and its bookkeeping alone."""
    config = jkv.CacheConfig.for_context_length(
        context + 64,
        max_sequences=batch,
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
    )
    seq_ids = jnp.arange(batch, dtype=jnp.int32)

    def bookkeeping(cache: jkv.Cache) -> tuple[jkv.Cache, jkv.Batch]:
        cache, batch = jkv.append(cache, seq_ids)
        return jkv.commit(cache, batch), batch

    def step(cache: jkv.Cache) -> tuple[jkv.Cache, jax.Array]:
        cache, batch = jkv.append(cache, seq_ids)
        hidden = jnp.ones((len(seq_ids), NUM_HEADS, HEAD_DIM), jnp.bfloat16)

        def layer(carry: Any, number: jax.Array) -> Any:
            cache, hidden = carry
            rows = hidden[:, :NUM_KV_HEADS]
            cache = jkv.write(cache, number, batch, rows, rows)
            return (cache, jkv.attend(cache, number, batch, hidden)), None

        layers = jnp.arange(NUM_LAYERS, dtype=jnp.int32)
        (cache, hidden), _ = jax.lax.scan(layer, (cache, hidden), layers)
        return jkv.commit(cache, batch), hidden

    held: list[Any] = []
    cases = []
    for name, function in (("step", step), ("bookkeeping", bookkeeping)):
        jitted = jax.jit(function, donate_argnums=0)

        def run(_: None, jitted: Any = jitted) -> None:
            for _ in range(CALLS):
                held[0], result = jitted(held[0])
            jax.block_until_ready(result)

        def prepare() -> None:
            cache, _ = jkv.truncate(held.pop(), seq_ids, context)
            held.append(cache)

        cases.append(Case(name=name, prepare=prepare, run=run, calls=CALLS))
    cache, _ = jax.jit(jkv.allocate, donate_argnums=0)(
        jkv.init(config), [context] * batch
    )
    grow = jax.jit(
        functools.partial(jkv.append, max_query_length=context), donate_argnums=0
    )
    held.append(grow(cache, seq_ids, context)[0])
    samples = harness.interleave(cases, rounds=rounds, warmup=1)
    share = samples["bookkeeping"].ratio_to(samples["step"])
    label = {"batch": batch, "context": context, "layers": NUM_LAYERS}
    return [
        {
            **label,
            "what": name,
            **taken.row(),
            "share": share if name != "step" else 1.0,
        }
        for name, taken in samples.items()
    ]


def copy_bandwidth(num_bytes: int, rounds: int) -> float:
    """Return bytes per second, read and written, of adding one to an array."""
    source = jnp.zeros((num_bytes // 4,), jnp.float32)
    case = make_case("copy", functools.partial(jax.jit(lambda a: a + 1), source), {})
    return 2 * num_bytes / harness.interleave([case], rounds=rounds)["copy"].median


def plot(rows: list[dict[str, Any]], copied: float, where: dict[str, Any]) -> None:
    """Draw bandwidth over bytes read, a line per peer."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for who in PEERS:
        points = sorted(
            (r["bytes"], r["GB/s"]) for r in rows if r["who"] == who and "GB/s" in r
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o", label=who, markersize=4)
    axes.axhline(copied / 1e9, color="gray", label="copy")
    axes.set(
        xscale="log", yscale="log", xlabel="bytes of keys and values", ylabel="GB/s"
    )
    axes.set_title(f"Decode attention, {where['device']}")
    axes.legend(fontsize=7)
    figure.savefig(PLOT, dpi=150, bbox_inches="tight")
    print(f"drawn in {PLOT}")


def main() -> None:
    """Test, measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--no-tests", action="store_true")
    options = parser.parse_args()
    where = harness.machine()
    quick = options.quick or where["platform"] == "cpu"
    print(harness.header("Attention on a GPU", where), flush=True)
    tests = None
    if not options.no_tests:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/attention/kernel/test_pallas.py",
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        tests = (done.stdout.strip().splitlines() or ["no output"])[-1]
        print(f"kernel tests: {tests}", flush=True)

    statistics = jax.devices()[0].memory_stats() or {}
    copied = copy_bandwidth(2**24 if quick else 2**31, options.rounds)
    print(f"a copy: {copied / 1e9:,.0f} GB/s", flush=True)
    decode: list[dict[str, Any]] = []
    for shape in decode_shapes(statistics.get("bytes_limit", 2**31), quick):
        decode += measure_decode(shape, options.rounds, copied)
        print(f"  measured {shape.label}", flush=True)
    columns = {k: k for k in ("batch x context", "who", "median", "p10", "p90", "GB/s")}
    columns |= {"of a copy": "of a copy", "ratio": "time by jkv", "refused": "refused"}
    print("\n" + harness.table(decode, columns))
    prefill = measure_prefill((64,) if quick else (512, 2_048, 8_192), options.rounds)
    print("\n" + harness.table(prefill, {k: k for k in prefill[0]}))
    step = measure_step(*((2, 64) if quick else (64, 2_048)), options.rounds)
    print("\n" + harness.table(step, {k: k for k in step[0]}))
    run = {
        "benchmark": "gpu",
        "machine": where,
        "kernel tests": tests,
        "copy GB/s": copied / 1e9,
        "decode": decode,
        "prefill": prefill,
        "step": step,
    }
    if quick:
        print("a tiny run: nothing is saved")
        return
    harness.save(options.json, run)
    plot(decode, copied, where)
    print(f"\nsaved in {options.json}")


if __name__ == "__main__":
    main()
