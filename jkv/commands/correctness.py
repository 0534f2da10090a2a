"""Comparison of attention on this device with the reference, feature by feature."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attention import paged_attention
from jkv.commands.report import Try
from jkv.formats.table import FORMATS


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes and options of one attention call."""

    name: str
    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    options: tuple[tuple[str, float], ...] = ()
    has_sinks: bool = False
    kv_dtype: str | None = None  # quantized dtype of keys; None: the queries' dtype
    value_dtype: str | None = None  # of values, if different


DECODE: dict[str, Any] = {"query_lengths": (1, 1, 1), "context_lengths": (70, 1, 33)}

CASES = (
    Case("decode", **DECODE),
    Case("prefill", (33, 5), (33, 40)),
    Case("mixed, with padding", (1, 7, 0, 1), (50, 7, 9, 16)),
    Case("one kv head", **DECODE, num_kv_heads=1),
    Case("a kv head each", **DECODE, num_heads=2),
    Case("7 heads a kv head", **DECODE, num_heads=14),
    Case("head dim 128", **DECODE, head_dim=128),
    Case("head dim 96", **DECODE, head_dim=96),
    Case("head dim 256", **DECODE, head_dim=256),
    Case("blocks of 4", **DECODE, block_size=4),
    Case("blocks of 64", **DECODE, block_size=64),
    Case("window", **DECODE, options=(("window", 20),)),
    Case("soft cap", **DECODE, options=(("soft_cap", 5.0),)),
    Case("sinks", **DECODE, has_sinks=True),
    *(
        Case(dtype.name, (1, 7, 1), (50, 7, 33), kv_dtype=dtype.name)
        for dtype, kept in FORMATS.items()
        if kept.is_quantized
    ),
    Case("int8, int4", (1, 7, 1), (50, 7, 33), kv_dtype="int8", value_dtype="int4"),
)


IMPLEMENTATIONS = ("xla", "pallas")

# Largest error against the reference by dtype: a few units in the last place around 1.
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}

# Cases of a quick check: requests of all kinds, and quantized storage.
QUICK_DTYPE = "float32"

QUICK_CASES = ("mixed, with padding", "int8")

# Cases with a comparison of gradients.
DERIVED_CASES = ("mixed, with padding", "sinks")

# In interpret mode, one case of the kernel takes as long as several of the others.
QUICK_INTERPRETED = ("mixed, with padding",)


def select_cases(implementation: str, *, is_quick: bool) -> tuple[Case, ...]:
    """Return the cases to compare: all, or a few with the widest coverage."""
    if not is_quick:
        return CASES
    is_interpreted = implementation == "pallas" and on_cpu()
    names = QUICK_INTERPRETED if is_interpreted else QUICK_CASES
    return tuple(case for case in CASES if case.name in names)


def list_tries(
    implementation: str, dtype: str, cases: tuple[Case, ...]
) -> dict[str, Try]:
    """Return the comparisons of one implementation in one dtype, by case name."""
    return {
        case.name: functools.partial(
            compare, find_error, case, dtype, implementation=implementation
        )
        for case in cases
    }


def list_derived(implementation: str) -> dict[str, Try]:
    """Return the gradient comparisons with unquantized pools, by dtype and case."""
    return {
        f"{dtype}, {case.name}": functools.partial(
            compare, find_gradient_error, case, dtype, implementation=implementation
        )
        for case in CASES
        for dtype in TOLERANCES
        if case.name in DERIVED_CASES
        and FORMATS[jnp.dtype(dtype)].stored_as == jnp.dtype(dtype)
    }


def compare(
    find: Callable[..., float], case: Case, dtype: str, implementation: str
) -> float:
    """Return the error against the reference; raise if it exceeds the tolerance."""
    error = find(case, dtype, implementation)
    if not error <= TOLERANCES[dtype]:  # NaN too
        raise ValueError(f"error {error:.2g}")
    return error


def find_error(case: Case, dtype: str, implementation: str) -> float:
    """Return the largest difference from the reference; unused slots are NaN."""
    operands, options = make_operands(case, dtype)
    call = functools.partial(paged_attention, *operands, **options)
    found = jax.jit(functools.partial(call, implementation=implementation))()
    wanted = find_wanted(case, dtype)
    difference = found.astype(jnp.float32) - wanted.astype(jnp.float32)
    # numpy, since XLA on CPU may drop NaN in a maximum.
    return float(np.max(np.abs(np.asarray(difference))))


def find_gradient_error(case: Case, dtype: str, implementation: str) -> float:
    """Return the largest difference of a gradient, relative to its largest value."""
    (*arrays, layer, tables, ids, starts, lengths, contexts), options = make_operands(
        case, dtype
    )
    # The gradient of an unused slot is 0, and 0 * NaN is NaN.
    arrays = [jnp.nan_to_num(array) for array in arrays]
    rest = layer, tables, ids, starts, lengths, contexts

    def differentiate(implementation: str) -> Any:
        attend = functools.partial(
            paged_attention, implementation=implementation, **options
        )

        def weigh(*arrays: jax.Array) -> jax.Array:
            output = attend(*arrays, *rest)
            weights = jnp.cos(jnp.arange(output.size, dtype=jnp.float32))
            return jnp.sum(output.astype(jnp.float32).reshape(-1) * weights)

        return jax.jit(jax.grad(weigh, argnums=(0, 1, 2)))(*arrays)

    errors = []
    for found, wanted in zip(
        differentiate(implementation), differentiate("reference"), strict=True
    ):
        found, wanted = (np.asarray(each, np.float32) for each in (found, wanted))
        errors.append(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))
    return float(np.max(errors))


@functools.cache
def find_wanted(case: Case, dtype: str) -> jax.Array:
    """Return the reference result of a case, cached for all implementations."""
    operands, options = make_operands(case, dtype)
    call = functools.partial(paged_attention, *operands, **options)
    return jax.jit(functools.partial(call, implementation="reference"))()


def make_operands(case: Case, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of `paged_attention`."""
    random = np.random.default_rng(0)
    tables, contents = _store_contexts(case, random)
    num_rows = sum(case.query_lengths)
    queries = random.standard_normal((num_rows, case.num_heads, case.head_dim))
    kv_dtype = jnp.dtype(case.kv_dtype or dtype)
    dtypes = kv_dtype, jnp.dtype(case.value_dtype or kv_dtype)
    options: dict[str, Any] = dict(case.options)
    options |= dict(zip(("kv_dtype", "value_dtype"), dtypes, strict=True))
    if case.has_sinks:
        sinks = random.standard_normal(case.num_heads)
        options["sinks"] = jnp.asarray(sinks, jnp.float32)
    arrays = [jnp.asarray(queries, dtype)]
    for name, stored_as, pool in zip(("key", "value"), dtypes, contents, strict=True):
        kept = FORMATS[stored_as]
        parts = kept.put(kept.prepare(jnp.asarray(pool)))
        arrays.append(parts["pool"])
        options[f"{name}_scales"] = parts.get("scales")
    starts = np.cumsum((0, *case.query_lengths[:-1]))
    lengths = (starts, case.query_lengths, case.context_lengths)
    integers = [jnp.asarray(each, jnp.int32) for each in lengths]
    return (*arrays, 0, jnp.asarray(tables), None, *integers), options


def _store_contexts(
    case: Case, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return block tables, i32[B, M], and keys and values, f32[2, 1, N, K, T, D].

    Blocks are in random order, and unused slots are NaN.
    """
    size = case.block_size
    needed = [-(-length // size) for length in case.context_lengths]
    num_blocks = sum(needed) + 1
    blocks = iter(random.permutation(num_blocks).tolist())
    tables = np.full((len(needed), max(needed)), 2**31 - 1, np.int32)
    shape = (2, 1, num_blocks, case.num_kv_heads, size, case.head_dim)
    contents = np.full(shape, np.nan, np.float32)
    for row, length in enumerate(case.context_lengths):
        tables[row, : needed[row]] = [next(blocks) for _ in range(needed[row])]
        for position in range(length):
            slot = (tables[row, position // size], slice(None), position % size)
            numbers = random.standard_normal((2, case.num_kv_heads, case.head_dim))
            contents[:, 0, *slot] = numbers
    return tables, contents


def on_cpu() -> bool:
    """Return True if JAX's first device is a CPU."""
    return jax.devices()[0].platform == "cpu"
