"""Calls of the attention for the doctor to compare, a feature each."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jkv.formats.table import FORMATS


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the attention: shapes and options."""

    name: str
    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    options: tuple[tuple[str, float], ...] = ()
    has_sinks: bool = False
    kv_dtype: str | None = None  # with scales, instead of the queries' dtype
    value_dtype: str | None = None  # of values, where they are stored otherwise


DECODE: dict[str, Any] = {
    "query_lengths": (1, 1, 1),
    "context_lengths": (70, 1, 33),
}

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


def make_operands(case: Case, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `paged_attention`, in order and by name."""
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

    The blocks are in random order, and what no token has is NaN.
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
