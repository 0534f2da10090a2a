"""Tests of attend on the tokens of a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_caches import (
    ROWS,
    allocate,
    append,
    free,
    opened,
    small_cache,
    table,
    write_tokens,
)

import jkv

# Compiled once for all tests and windows.
attend = jax.jit(jkv.attend, static_argnames="scale")
QUERIES = np.random.default_rng(0).standard_normal((ROWS, 2, 2)).astype(np.float32)
NUMBERS = np.random.default_rng(1).standard_normal(ROWS).astype(np.float32)


def advance(cache, seq_ids, counts, numbers=NUMBERS):
    """Append and write; return the cache and the batch."""
    cache, step = append(cache, seq_ids, counts)
    return write_tokens(cache, step, numbers), step.batch


def attended(cache, batch, queries=QUERIES, **options):
    return np.asarray(attend(cache, 0, batch, queries, **options))


@pytest.mark.one_end
def test_is_causal_up_to_its_own_position():
    # One call with five tokens equals five calls with one.
    together = attended(*advance(opened(0), 0, 5))
    cache = opened(0)
    for row in range(5):
        cache, batch = advance(cache, 0, 1, NUMBERS[row : row + 1])
        alone = attended(cache, batch, np.roll(QUERIES, -row, axis=0))
        np.testing.assert_allclose(alone[0], together[row], atol=1e-6)


@pytest.mark.one_end
def test_padded_rows_equal_packed_rows():
    cache, batch = advance(opened(3, 5), [1, 0], 1)
    packed = attended(cache, batch)[:2]
    cache, batch = jkv.append(opened(3, 5), np.array([1, 0], np.int32))
    assert batch.is_decoding
    cache = write_tokens(cache, batch, NUMBERS[:2])
    np.testing.assert_allclose(
        attended(cache, batch, QUERIES[:2]), packed, atol=1e-6, rtol=1e-6
    )


@pytest.mark.one_end
def test_invalid_rows_give_zeros():
    found = attended(*advance(opened(3, 2), [-1, 0, 9], [1, 2, 1]))
    assert not found[[0, *range(3, ROWS)]].any()
    assert found[[1, 2]].all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.one_end
def test_returns_the_dtype_of_the_queries(dtype):
    cache, batch = advance(opened(3, dtype=dtype), 0, 1)
    for query_dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
        queries = jax.ShapeDtypeStruct((ROWS, 2, 2), query_dtype)
        found = jax.eval_shape(functools.partial(jkv.attend, cache, 0, batch), queries)
        assert found.dtype == query_dtype


def test_a_window_counts_its_token_and_may_be_traced():
    cache, batch = advance(opened(3), 0, 1)
    newest = np.asarray(jkv.read(cache, 0, 0)[1])[3]  # [K, D] of the only visible token
    queries = np.ones((ROWS, 2, 2), np.float32)
    traced = {
        window: attended(cache, batch, queries, window=np.int32(window))[0]
        for window in (1, 2, 4, 9)
    }
    np.testing.assert_allclose(traced[1], np.repeat(newest, 2, 0), atol=1e-6)
    for window in (1, 2):
        given = np.asarray(jkv.attend(cache, 0, batch, queries, window=window))[0]
        np.testing.assert_allclose(traced[window], given, atol=1e-6)
    # The sequence has only four tokens.
    np.testing.assert_array_equal(traced[4], traced[9])
    np.testing.assert_allclose(traced[9], attended(cache, batch, queries)[0], atol=1e-6)
    assert np.abs(traced[1] - traced[2]).max() > 1e-3


@pytest.mark.one_end
def test_the_default_scale_is_one_over_root_d():
    cache, batch = advance(opened(3), 0, 1)
    default = attended(cache, batch)
    named = attended(cache, batch, scale=float(1 / np.sqrt(2.0)))
    np.testing.assert_allclose(default, named, atol=1e-6)
    assert np.abs(default - attended(cache, batch, scale=1.0)).max() > 1e-3


@pytest.mark.one_end
def test_attention_is_independent_of_block_order():
    expected = attended(*advance(opened(0), 0, 10))
    worn, _ = free(opened(4, 8, 4), [1, 0, 2])
    worn, result = allocate(worn, 0)
    worn, _ = append(worn, result.seq_ids, 14)  # wraps around the ring
    worn, _ = free(worn, result.seq_ids)
    worn, result = allocate(worn, 0)
    worn, batch = advance(worn, result.seq_ids, 10)
    (row,) = result.seq_ids
    assert table(worn, row) != sorted(table(worn, row))
    np.testing.assert_array_equal(attended(worn, batch)[:10], expected[:10])


@pytest.mark.one_end
def test_query_head_h_reads_kv_head_h_over_group():
    cache, step = append(allocate(small_cache(num_kv_heads=2), 0)[0], 0)
    values = np.zeros((ROWS, 2, 2), np.float32)
    values[0] = [[1.0, 1.0], [2.0, 2.0]]
    cache = jkv.write(cache, 0, step.batch, values, values)
    found = jkv.attend(cache, 0, step.batch, np.ones((ROWS, 6, 2), np.float32))
    assert found[0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.one_end
def test_nan_spreads_only_to_rows_that_may_read_it(name):
    """A NaN key affects rows that attend to it; a NaN value, rows of its request."""
    cache, step = append(opened(3, 5), [0, 1], [4, 3])
    clean = np.ones((ROWS, 1, 2), np.float32)
    bad = clean.copy()
    bad[2] = np.nan  # third of the four rows of sequence 0
    rows = dict(keys=clean, values=clean) | {name: bad}
    cache = jkv.write(cache, 0, step.batch, **rows)
    found = np.isnan(attended(cache, step.batch)).any(axis=(1, 2))
    assert found[2:4].all() and not found[4:].any()
    if name == "keys":
        assert not found[:2].any()
