"""Pools in programs for TPUs, which tile the last two axes.

A reshape that joins these axes is free elsewhere, but copies a pool there. The output
of
XLA's TPU compiler for a step is in `benchmarks/results/tpu_compile.json`.
"""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.attention.backend import SlotWrite
from jkv.attention.choice import scatter, scatter_by_head
from jkv.attention.xla import tiles
from jkv.formats.format import Formats
from jkv.formats.table import FORMATS

pytestmark = pytest.mark.one_end

INT8 = FORMATS[jnp.dtype("int8")]

CONFIG = jkv.CacheConfig(
    num_layers=3,
    num_kv_heads=2,
    head_dim=24,
    num_blocks=7,
    block_size=4,
    max_sequences=2,
    max_context_length=20,
    dtype="float32",
)


def step(cache, seq_ids, counts, rows):
    cache, batch = jkv.append(cache, seq_ids, counts, capacity=rows.shape[0])
    for layer in range(CONFIG.num_layers):
        cache = jkv.write(cache, layer, batch, rows, rows)
        rows = jkv.attend(cache, layer, batch, rows)
    return cache, rows


def lower(platform, num_rows):
    cache, opened = jkv.allocate(jkv.init(CONFIG), [0, 0])
    rows = jnp.ones((num_rows, CONFIG.num_kv_heads, CONFIG.head_dim))
    traced = jax.jit(step).trace(cache, opened.seq_ids, jnp.array([1, 1]), rows)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def find_tail_changes(text, pool):
    """Return operations that change the last two axes of a whole pool."""
    found = []
    for line in text.splitlines():
        types = re.search(r" : \(tensor<([\dx]+)x\w+>.*\) -> tensor<([\dx]+)x", line)
        if types is None:
            continue
        before, after = ([int(n) for n in each.split("x")] for each in types.groups())
        if math.prod(before) == math.prod(after) == pool.size:
            found += [line] if before[-2:] != after[-2:] else []
    return found


@pytest.mark.parametrize("num_rows", [2, 8])
def test_no_pool_is_retiled(num_rows):
    pool = jax.eval_shape(lambda: jkv.init(CONFIG)).storage[0].key_pool
    text = lower("tpu", num_rows)
    assert not find_tail_changes(text, pool)
    # A scatter into a pool does not move heads.
    assert "update_window_dims = [1, 2]" not in text
    elsewhere = lower("cpu", num_rows)
    assert find_tail_changes(elsewhere, pool), "the flat view, which is free there"
    assert "update_window_dims = [1, 2]" in elsewhere


def test_tiled_gathers_equal_plain_gathers():
    pool = jax.random.normal(jax.random.key(0), (2, 5, 3, 4, 8))
    starts = jnp.array([[0, 1], [1, 4], [1, 9], [5, -2]])
    chex.assert_trees_all_equal(
        tiles._gather_tiled(pool, starts), tiles._gather_flat(pool, starts)
    )


@pytest.mark.parametrize("part", [None, 1])
def test_tiled_stores_equal_plain_stores(part):
    """The stores include padding rows and scales."""
    shape = 2, 5, 3, 4
    random = np.random.default_rng(0)
    draw = functools.partial(random.integers, 0, 100)
    arrays = {
        "key_pool": jnp.asarray(draw(size=(*shape, 8)), jnp.int8),
        "value_pool": jnp.asarray(draw(size=(*shape, 8)), jnp.int8),
        "key_scales": jnp.asarray(draw(size=shape), jnp.uint16),
        "value_scales": jnp.asarray(draw(size=shape), jnp.uint16),
    }
    rows = jnp.asarray(random.normal(size=(2, 6, 3, 8)), jnp.float32)
    write = SlotWrite(
        arrays=arrays,
        rows={"key_pool": rows[0], "value_pool": rows[1]},
        layer=jnp.int32(1),
        block_ids=jnp.array([0, 4, 2, 5, 2, 1], jnp.int32),
        offsets=jnp.array([5, 7, 0, 4, 6, 3], jnp.int32) % (4 if part is None else 8),
        valid=jnp.array([True, True, True, True, False, True]),
        part=None if part is None else jnp.int32(part),
        formats=Formats(INT8, INT8),
    )
    stored = scatter(write)
    chex.assert_trees_all_equal(scatter_by_head(write), stored)
    for name, array in arrays.items():
        assert not np.array_equal(stored[name], array), name
