"""Tests of write: rows are stored in their slots, and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_caches import (
    allocate,
    append,
    fork,
    free,
    grow,
    opened,
    small_cache,
    stored_tokens,
    truncate,
    with_storage_filled,
    write_tokens,
)

import jkv

pytestmark = pytest.mark.one_end

FLOATS = [jnp.float32, jnp.float16, jnp.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS)
def test_casts_to_the_storage(dtype):
    cache, step = append(opened(0, dtype=dtype), 0)
    rows = np.full((16, 1, 2), 1.2345678, np.float32)
    cache = jkv.write(cache, 0, step.batch, rows, rows)
    keys, values, _ = jkv.read(cache, 0, 0)
    assert cache.dtype == keys.dtype == values.dtype == dtype
    assert np.asarray(keys)[0, 0, 0] == np.float32(1.2345678).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_dtype_follows_forks_and_rollbacks(dtype):
    cache, _ = fork(opened(6, dtype=dtype), 0)
    cache, _ = truncate(cache, 1, 2)
    assert stored_tokens(cache, 0) == list(range(6))
    assert stored_tokens(cache, 1) == [0, 1]


def test_the_layer_may_be_traced():
    cache = opened(0, num_layers=2)
    cache, step = append(cache, 0)

    def write_layer(index, cache):
        layer = 2 - index
        rows = jnp.full((16, 1, 2), 1.0, jnp.float32) * layer.astype(jnp.float32)
        return jkv.write(cache, layer, step.batch, rows, -rows)

    # Layers 2 and -1 do not exist; no other layer is written instead.
    cache = jax.lax.fori_loop(0, 4, write_layer, cache)
    for layer in range(2):
        keys, values, _ = jax.device_get(jkv.read(cache, layer, 0))
        assert keys[0].tolist() == [[layer, layer]]
        assert values[0].tolist() == [[-layer, -layer]]


def test_each_layer_has_its_own_slots():
    cache, step = append(opened(6, num_layers=2), 0)
    cache = write_tokens(cache, step, [9.5])
    (block,), (offset,) = step.block_ids, step.offsets
    for layer in range(2):
        key, value = jkv.read_slot(cache, layer, block, offset)
        assert key.shape == value.shape == (1, 2)
        assert key.tolist() == [[9.5, 9.5]] and value.tolist() == [[-9.5, -9.5]]


def test_invalid_rows_are_dropped():
    cache = opened(3, 2)
    pool = np.array(cache.storage[0].key_pool)
    cache, step = append(cache, [-1, 9, 0], [1, 1, 15])
    cache = write_tokens(cache, step, range(16))
    np.testing.assert_array_equal(np.asarray(cache.storage[0].key_pool), pool)


def test_writes_nothing_but_its_slots():
    cache = opened(3, 2)
    pool = np.array(cache.storage[0].key_pool)
    cache, step = append(cache, [1, 0, -1])
    cache = write_tokens(cache, step, [7, 8, 9])
    for row, number in ((0, 7), (1, 8)):
        pool[0, step.block_ids[row], :, step.offsets[row]] = number
    np.testing.assert_array_equal(np.asarray(cache.storage[0].key_pool), pool)


@pytest.mark.one_end
@pytest.mark.parametrize(
    "dtype, cast", [("float32", "key_pool"), ("int8", "key_scales")]
)
def test_a_cast_cache_is_reported_by_name(dtype, cast):
    """`write` and `check` refuse a pool whose dtype was cast."""
    cache, step = append(opened(5, dtype=dtype), 0)
    (storage,) = cache.storage
    pool = storage.arrays[cast].astype(np.float16)
    cache = cache.with_storage((storage.with_arrays({cast: pool}),))
    with pytest.raises(TypeError, match=f"{cast} must have dtype .* for {dtype}"):
        write_tokens(cache, step, [1])
    with pytest.raises(jkv.InvariantError, match=f"storage.0.{cast} is float16"):
        jkv.check(cache)


def test_unwritten_slots_are_never_read():
    """The pool is NaN in the rest of the last block and in reserved blocks."""
    cache, _ = allocate(small_cache(), [14, 14])
    cache = grow(cache, 0, range(5))
    queries = np.ones((16, 2, 2), np.float32)
    cache, step = append(cache, [0, 1])
    cache = write_tokens(cache, step, [5, 6])
    found = np.asarray(jkv.attend(cache, 0, step.batch, queries))[:2]
    assert np.isfinite(found).all() and found.all()
    assert stored_tokens(cache, 0) == list(range(6))
    # After reuse the slots hold another sequence's values, which are not read either.
    cache, _ = free(with_storage_filled(cache, 1e30), [0, 1])
    cache, _ = allocate(cache, 0)
    cache = grow(cache, 2, [1.0, 2.0])
    cache, step = append(cache, 2)
    cache = write_tokens(cache, step, [3.0])
    found = np.asarray(jkv.attend(cache, 0, step.batch, queries))[:1]
    assert (found <= -1.0).all() and (found >= -3.0).all()
