"""Random calls of any shape, compared with float64 arithmetic on plain arrays.

Nothing is shared with the package: elements and scales are drawn as bits of numpy's
dtypes, and a row is computed from the tokens that it attends to. Each run draws a few
calls, as each compiles; `JKV_RANDOM_CALLS=200` draws that many.
"""

import os
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from support.attention.served_shapes import Shape, is_served
from support.jax_versions import IS_NEWEST
from support.tolerances import assert_close, is_close

from jkv.attention import paged_attention

NUM_CALLS = int(os.environ.get("JKV_RANDOM_CALLS", 0))
SEEDS = range(NUM_CALLS) if NUM_CALLS else [(0, 1), (2,)][IS_NEWEST]

HEAD_DIMS = (8, 16, 24, 32, 48, 64, 80, 96, 128)
BLOCK_SIZES = (1, 2, 3, 4, 8, 13, 16, 32, 64, 256)
STORED = (
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
)


class Drawn(NamedTuple):
    """A call, and its decoded operands."""

    positional: list  # arguments of `paged_attention`
    options: dict
    keys: list[np.ndarray]  # by request, f64[context, K, D]
    values: list[np.ndarray]  # by request, f64[context, K, Dv]
    owners: list[tuple[int, int]]  # request and position of each row, -1 for padding


def draw_pool(rng, shape, stored, used):
    """Draw stored elements and scales, and decode them; unused slots hold NaN."""
    dtype = np.dtype(getattr(ml_dtypes, stored, stored))
    if dtype.itemsize > 1:
        meant = rng.standard_normal(shape).astype(dtype)
        meant[~used.any(axis=-1)] = np.nan
        bits = meant.view(np.uint16) if stored == "bfloat16" else meant
        return bits, None, meant.astype(np.float64)
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    codes = codes[np.isfinite(codes.astype(np.float64))]
    elements = rng.choice(codes, shape)
    largest = np.abs(codes.astype(np.float64)).max()
    scales = rng.uniform(0.5, 3, shape[:-1]) / largest
    scales = scales.astype(ml_dtypes.bfloat16)
    scales[~used.any(axis=-1)] = np.nan
    bits = elements.view(np.int8 if stored == "int8" else np.uint8)
    meant = elements.astype(np.float64) * scales.astype(np.float64)[..., None]
    return bits, scales.view(np.uint16), meant


def draw(seed) -> Drawn:
    """Draw a call."""
    rng = np.random.default_rng(seed)
    is_latent, stored = rng.random() < 0.25, STORED[rng.integers(len(STORED))]
    kv_heads = 1 if is_latent else int(rng.integers(1, 4))
    group, layers = int(rng.integers(1, 17)), int(rng.integers(1, 4))
    head_dim, value_dim = (int(dim) for dim in rng.choice(HEAD_DIMS, 2))
    if is_latent:
        value_dim = min(head_dim, value_dim)
    size = int(rng.choice(BLOCK_SIZES))
    lengths = rng.integers(0, 90, rng.integers(1, 6))
    queries = np.where(
        rng.random(len(lengths)) < 0.5, 1, rng.integers(0, 20, len(lengths))
    )
    queries = np.minimum(queries, lengths)
    num_rows = int(queries.sum()) + int(rng.integers(1, 5))

    # Shuffled blocks, and noise in the rest of the tables.
    needed = -(-lengths // size)
    num_blocks = int(needed.sum()) + 2
    blocks = iter(rng.permutation(num_blocks).tolist())
    most = int(needed.max()) + 1
    tables = rng.integers(-(2**20), 2**20, (len(lengths), most), np.int32)
    shape = layers, num_blocks, kv_heads, size
    used = np.zeros((*shape, 1), bool)
    places = []
    for request, length in enumerate(lengths):
        mine = np.array([next(blocks) for _ in range(needed[request])], np.int64)
        tables[request, : len(mine)] = mine
        token = np.arange(length)
        places.append((mine[token // size] if length else token, token % size))
        used[:, places[-1][0], :, places[-1][1]] = True
    key_bits, key_scales, keys = draw_pool(rng, (*shape, head_dim), stored, used)
    value_bits, value_scales, values = None, None, keys[..., :value_dim]
    if not is_latent:
        value_bits, value_scales, values = draw_pool(
            rng, (*shape, value_dim), stored, used
        )

    layer = int(rng.integers(layers))
    rows = rng.standard_normal((num_rows, kv_heads * group, head_dim))
    starts = np.cumsum(queries) - queries
    owners = [(-1, -1)] * num_rows
    for request, (start, count) in enumerate(zip(starts, queries, strict=True)):
        for i in range(count):
            owners[start + i] = request, int(lengths[request] - count + i)
    options = {
        "scale": float(rng.uniform(0.2, 1.5) * head_dim**-0.5),
        "window": int(rng.integers(1, 60)) if rng.random() < 0.4 else None,
        "soft_cap": float(rng.uniform(0.5, 5)) if rng.random() < 0.3 else None,
        "sinks": rng.standard_normal(kv_heads * group).astype(np.float32)
        if rng.random() < 0.3
        else None,
        "key_scales": key_scales,
        "value_scales": value_scales,
        "kv_dtype": stored,
        "value_head_dim": value_dim if is_latent else None,
    }
    requests = np.arange(len(lengths)), starts, queries, lengths
    return Drawn(
        positional=[
            rows.astype(np.float32),
            key_bits,
            value_bits,
            np.int32(layer),
            tables,
            *(each.astype(np.int32) for each in requests),
        ],
        options=options,
        keys=[keys[layer][place[0], :, place[1]] for place in places],
        values=[values[layer][place[0], :, place[1]] for place in places],
        owners=owners,
    )


def attend(drawn: Drawn):
    """Attend row by row in float64; padding rows are zeros."""
    rows, options = drawn.positional[0].astype(np.float64), drawn.options
    value_dim = drawn.values[0].shape[-1]
    output = np.zeros((*rows.shape[:2], value_dim))
    lse = np.full(rows.shape[:2], -np.inf)
    for row, (request, position) in enumerate(drawn.owners):
        if request < 0:
            continue
        first = max(0, position + 1 - (options["window"] or 2**30))
        keys = drawn.keys[request][first : position + 1]
        values = drawn.values[request][first : position + 1]
        group = rows.shape[1] // keys.shape[1]
        scores = np.einsum("hd,shd->hs", rows[row], np.repeat(keys, group, axis=1))
        scores *= options["scale"]
        if options["soft_cap"] is not None:
            scores = options["soft_cap"] * np.tanh(scores / options["soft_cap"])
        weights = np.exp(scores)
        total = weights.sum(axis=1)
        if options["sinks"] is not None:
            total += np.exp(options["sinks"].astype(np.float64))
        mixed = np.einsum("hs,shd->hd", weights, np.repeat(values, group, axis=1))
        output[row], lse[row] = mixed / total[:, None], np.log(total)
    return output, lse


@pytest.mark.newest_further
@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_equal_plain_arithmetic(seed):
    drawn = draw(seed)
    expected, logs = attend(drawn)
    dims = drawn.positional[0].shape[-1], drawn.values[0].shape[-1]
    stored = drawn.options["kv_dtype"]
    ways = ["reference", "xla", None]
    ways += ["pallas"] * is_served(Shape(*dims, "float32", stored, stored))
    for implementation in ways:
        call = jax.jit(
            lambda *positional, implementation=implementation: paged_attention(
                *positional,
                **drawn.options,
                return_lse=True,
                implementation=implementation,
            )
        )
        output, lse = jax.device_get(call(*drawn.positional))
        assert_close(output, expected)
        assert_close(lse, logs)
        if np.abs(expected).max() > 0.1:
            assert not is_close(np.roll(output, 1, axis=2), expected)
