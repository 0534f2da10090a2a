"""Attention workloads shared by tests and benchmarks, by name.

A workload is a batch of requests, each with a number of query rows and a context length
after the step. `benchmarks/attention.py` runs them in full; the tests run a reduced
copy
(`shrink`) with the same proportions.
"""

import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of one attention call per layer."""

    name: str
    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    num_heads: int = 8
    num_kv_heads: int = 8
    head_dim: int = 64
    value_head_dim: int = 64
    block_size: int = 16
    num_layers: int = 8

    @property
    def num_rows(self) -> int:
        return sum(self.query_lengths)

    @property
    def num_tokens(self) -> int:
        """Number of cached tokens read in each layer."""
        return sum(self.context_lengths)

    @property
    def kv_bytes(self) -> int:
        """Bytes of float32 keys and values read in all layers."""
        width = self.head_dim + self.value_head_dim
        return 4 * self.num_tokens * self.num_kv_heads * width * self.num_layers


def decode(name: str, context_lengths: tuple[int, ...], **changes: int) -> Workload:
    """Return a decode workload: one query row per sequence."""
    return Workload(
        name=name,
        query_lengths=(1,) * len(context_lengths),
        context_lengths=context_lengths,
        **changes,
    )


EQUAL = (1000,) * 16
ONE_LONG = (1000,) + (32,) * 15
UNIFORM = tuple(1 + 999 * i // 15 for i in range(16))

WORKLOADS = (
    decode("decode-equal", EQUAL),
    decode("decode-one-long", ONE_LONG),
    decode("decode-uniform", UNIFORM),
    decode("decode-equal-grouped", EQUAL, num_heads=32),
    decode("decode-one-long-grouped", ONE_LONG, num_heads=32),
    decode("decode-long-context", (32_000, 8_000), num_layers=4),
    decode("decode-long-context-grouped", (32_000, 8_000), num_layers=4, num_heads=32),
    Workload(name="prefill", query_lengths=(512,), context_lengths=(512,)),
    Workload(
        name="prefill-grouped",
        query_lengths=(512,),
        context_lengths=(512,),
        num_heads=32,
    ),
    Workload(name="prefill-chunk", query_lengths=(256,), context_lengths=(2048,)),
    Workload(
        name="mixed",
        query_lengths=(256,) + (1,) * 15,
        context_lengths=(1024,) + (500,) * 15,
    ),
)


class Operands(NamedTuple):
    """Operands of `paged_attention`; slots that hold no token contain NaN or noise."""

    queries: np.ndarray  # f32[num_layers, R, H, D]
    key_pool: np.ndarray  # f32[L, N, K, T, D]
    value_pool: np.ndarray  # f32[L, N, K, T, Dv]
    block_tables: np.ndarray  # i32[B, M]
    query_starts: np.ndarray  # i32[B]
    query_lengths: np.ndarray  # i32[B]
    context_lengths: np.ndarray  # i32[B]
    keys: list[np.ndarray]  # by request, f32[L, context, K, D]
    values: list[np.ndarray]  # by request, f32[L, context, K, Dv]


def make_operands(
    workload: Workload,
    seed: int = 0,
    *,
    num_blocks: int | None = None,
    max_blocks: int | None = None,
) -> Operands:
    """Create operands with random keys and values in shuffled blocks.

    Without sizes, the pool and the tables are slightly larger than needed.
    """
    w, rng = workload, np.random.default_rng(seed)
    blocks_of = [-(-length // w.block_size) for length in w.context_lengths]
    num_blocks = num_blocks or sum(blocks_of) + 3
    max_blocks = max_blocks or max(blocks_of) + 1
    shape = (w.num_layers, num_blocks, w.num_kv_heads, w.block_size)
    key_pool = np.full((*shape, w.head_dim), np.nan, np.float32)
    value_pool = np.full((*shape, w.value_head_dim), np.nan, np.float32)
    free = rng.permutation(num_blocks)
    tables = rng.integers(-(2**20), 2**20, (len(blocks_of), max_blocks), np.int32)
    keys, values = [], []
    for request, (length, count) in enumerate(
        zip(w.context_lengths, blocks_of, strict=True)
    ):
        mine, free = free[:count], free[count:]
        tables[request, :count] = mine
        for pool, contents in ((key_pool, keys), (value_pool, values)):
            tokens = rng.standard_normal(
                (w.num_layers, length, w.num_kv_heads, pool.shape[-1]), np.float32
            )
            contents.append(tokens)
            token = np.arange(length)
            pool[:, mine[token // w.block_size], :, token % w.block_size] = np.moveaxis(
                tokens, 1, 0
            )
    lengths = np.array(w.query_lengths, np.int32)
    return Operands(
        queries=rng.standard_normal(
            (w.num_layers, w.num_rows, w.num_heads, w.head_dim), np.float32
        ),
        key_pool=key_pool,
        value_pool=value_pool,
        block_tables=tables,
        query_starts=np.cumsum(lengths, dtype=np.int32) - lengths,
        query_lengths=lengths,
        context_lengths=np.array(w.context_lengths, np.int32),
        keys=keys,
        values=values,
    )


def shrink(workload: Workload, factor: int = 40) -> Workload:
    """Return a workload of the same proportions, small enough for a test."""
    return dataclasses.replace(
        workload,
        query_lengths=tuple(
            1 if length == 1 else -(-length // factor)
            for length in workload.query_lengths
        ),
        context_lengths=tuple(
            -(-length // factor) for length in workload.context_lengths
        ),
        block_size=4,
        head_dim=16,
        value_head_dim=16,
        num_layers=2,
    )
