"""Masks within a step against dense float64 attention."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dense_masks import Request, as_mask, attend_densely, random_request

import jkv
from jkv import Status

NUM_REQUESTS, CAPACITY, HEADS = 5, 48, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "all": {"window": 9, "soft_cap": 5.0, "sinks": jnp.array([0.5, -1.0, 2.0, 0.0])},
}


def make_cache(dtype: str = "float32", **more: Any) -> jkv.Cache:
    config = jkv.CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        num_blocks=96,
        block_size=4,
        max_sequences=8,
        max_context_length=96,
        dtype=dtype,
        **more,
    )
    return jkv.init(config)


@functools.partial(jax.jit, static_argnames=("capacity", "max_span"))
def grow(cache, seq_ids, counts, rows, mask, *, capacity, max_span=None):
    """Append rows under a mask and write both layers."""
    cache, batch = jkv.append(
        cache, seq_ids, counts, capacity=capacity, mask=mask, max_span=max_span
    )
    for layer in range(2):
        cache = jkv.write(cache, layer, batch, rows[1] + layer, rows[2])
    return cache, batch


@functools.partial(jax.jit, static_argnames=("implementation", "soft_cap", "causal"))
def look(cache, batch, queries, window=None, sinks=None, **static):
    return jkv.attend(
        cache, 1, batch, queries, window=window, sinks=sinks, return_lse=True, **static
    )


def random_rows(rng, num_rows: int = CAPACITY) -> tuple[jax.Array, ...]:
    shapes = ((num_rows, heads, 16) for heads in (HEADS, 2, 2))
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def prefill(rng, cache: jkv.Cache, lengths: list[int]) -> tuple[jkv.Cache, jax.Array]:
    """Open sequences with contexts of these lengths, the last a fork of the first."""
    cache, opened = jkv.allocate(cache, [0] * (NUM_REQUESTS - 1))
    ids = jnp.append(opened.seq_ids, -1)
    for _ in range(2):
        counts = jnp.array([length // 2 for length in lengths[:-1]] + [0])
        rows = random_rows(rng, 96)
        cache, _ = grow(cache, ids, counts, rows, jkv.CausalMask(), capacity=96)
    cache, forked = jkv.fork(cache, opened.seq_ids[:1])
    return cache, jnp.append(opened.seq_ids, forked.seq_ids)


def check_against_dense(cache, batch, queries, requests, found, **options: Any) -> None:
    """Compare every served request's rows with dense attention."""
    output, lse = (np.asarray(x) for x in found)
    start = 0
    for request, seq_id, status in zip(
        requests, batch.seq_ids.tolist(), batch.status.tolist(), strict=True
    ):
        rows = slice(start, start + request.num_rows)
        start += request.num_rows
        if status != Status.OK or request.num_rows == 0:
            assert not output[rows].any()
            continue
        keys, values, length = jkv.read(cache, 1, seq_id)
        expected = attend_densely(
            np.asarray(queries[rows]),
            np.asarray(keys.astype(jnp.float32))[: int(length)],
            np.asarray(values.astype(jnp.float32))[: int(length)],
            request,
            **options,
        )
        np.testing.assert_allclose(output[rows], expected[0], rtol=3e-5, atol=3e-5)
        np.testing.assert_allclose(lse[rows], expected[1], rtol=3e-5, atol=3e-5)
    assert not output[start:].any()


# Each mix is one program: the kinds of requests, in turn.
MIXES = {
    "spans": ("span", "causal", "span", "causal", "span"),
    "all": ("span", "tree", "start", "canvas", "causal"),
    "canvases": ("canvas",) * 5,
    "trees": ("tree",) * 5,
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mix", MIXES)
def test_masks_agree_with_dense_attention(mix, option):
    options = OPTIONS[option]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        dtype = ("float32", "int8", "float32")[seed] if mix == "all" else "float32"
        past = [[14, 22, 0, 30, 0], [1, 9, 40, 12, 0], [0, 0, 0, 0, 0]][seed]
        cache, ids = prefill(rng, make_cache(dtype), past)
        counts = rng.integers(1, 10, NUM_REQUESTS)
        counts[seed] = 1
        pairs = zip(MIXES[mix], counts, strict=True)
        requests = [random_request(rng, kind, int(n)) for kind, n in pairs]
        rows = random_rows(rng)
        mask = as_mask(requests, CAPACITY)
        given = cache, ids, jnp.asarray(counts), rows, mask
        cache, batch = grow(*given, capacity=CAPACITY)
        assert not batch.status.any()
        found = look(cache, batch, rows[0], **options)
        check_against_dense(cache, batch, rows[0], requests, found, **options)
        causal = [Request(request.num_rows) for request in requests]
        if mix != "trees" and mix != "all":
            found = look(cache, batch, rows[0], causal=True, **options)
            check_against_dense(cache, batch, rows[0], causal, found, **options)
