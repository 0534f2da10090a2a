"""How much of the memory's bandwidth a copy and a decode step reach."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.attention import paged_attention
from jkv.commands.correctness import IMPLEMENTATIONS, on_cpu
from jkv.commands.report import Report

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16

# Samples that are timed, after those that warm up, and the calls of each, so that the
# host does not count.
NUM_TIMED, NUM_WARM_UP, NUM_CALLS = 5, 1, 10


class Load(NamedTuple):
    """How much to move."""

    copy_bytes: int
    batch_size: int
    context_length: int


# The second is a good part of a GPU's memory.
ON_CPU, ON_GPU = Load(2**26, 8, 1024), Load(2**30, 64, 8192)


def measure_bandwidth(report: Report) -> None:
    """Time a copy, and decoding over contexts that fill a good part of the memory."""
    load = ON_CPU if on_cpu() else ON_GPU
    copied = measure_copy(load)
    what = f"a copy of {load.copy_bytes >> 20} MiB"
    report.add("ok", what, f"{copied:,.0f} GB/s, read and write")

    step, num_bytes = make_step(load)
    for implementation in (None, *IMPLEMENTATIONS):
        name = implementation or "as chosen"
        what = (
            f"decode, {load.batch_size} contexts of {load.context_length:,}, bfloat16, "
            f"{name}"
        )
        if on_cpu() and implementation == "pallas":
            report.add("not checked", what, "the kernel is interpreted here")
            continue
        call = jax.jit(
            functools.partial(paged_attention, implementation=implementation)
        )
        try:
            reached = num_bytes / find_median_seconds(call, *step) / 1e9
        except NotImplementedError as reason:
            report.add("not checked", what, str(reason))
            continue
        detail = f"{reached:,.0f} GB/s, {reached / copied:.0%} of the copy's"
        report.add("ok", what, detail)


def measure_copy(load: Load) -> float:
    """Return how fast an array is read and another written, in GB/s."""
    source = jnp.ones((load.copy_bytes // 4,), jnp.float32)
    seconds = find_median_seconds(jax.jit(lambda array: array + 1), source)
    return 2 * load.copy_bytes / seconds / 1e9


def make_step(load: Load) -> tuple[tuple[Any, ...], int]:
    """Return the arguments of one decode step, and the bytes of K/V that it reads."""
    blocks = load.context_length // BLOCK_SIZE
    num_blocks = load.batch_size * blocks
    shape = 1, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM
    # Two, or half of the reading came out of a cache.
    keys, values = (jnp.full(shape, x, jnp.bfloat16) for x in (0.5, 0.25))
    tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    queries = jnp.ones((load.batch_size, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    ones = jnp.ones((load.batch_size,), jnp.int32)
    contents = (keys, values, 0, jnp.asarray(tables.reshape(-1, blocks)), None)
    lengths = (jnp.cumsum(ones) - 1, ones, ones * load.context_length)
    return (queries, *contents, *lengths), keys.nbytes + values.nbytes


def find_median_seconds(function: Callable[..., jax.Array], *arguments: Any) -> float:
    """Return the median time of a call, compiled before."""
    taken = []
    for _ in range(NUM_WARM_UP + NUM_TIMED):
        began = time.perf_counter()
        for _ in range(NUM_CALLS):
            result = function(*arguments)
        result.block_until_ready()
        taken.append((time.perf_counter() - began) / NUM_CALLS)
    return statistics.median(taken[NUM_WARM_UP:])
