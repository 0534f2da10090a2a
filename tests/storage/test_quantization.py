"""int8, fp8 and int4: the encoding of rows, and scales that move with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention import formats
from support.jax_versions import dealt, few
from support.small_caches import (
    allocate,
    append,
    fork,
    free,
    reorder,
    small_config,
)

import jkv
from jkv.formats.scaled import largest_number

DTYPES = ["int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"]
# Half a step where steps are widest: relative to the largest number for int8, to the
# number itself for floats.
HALF_STEP = {
    "int8": 0.5 / 127,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
HEADS, HEAD_DIM, VALUE_DIM = 2, 16, 8
quantize = jax.jit(formats.quantize, static_argnums=1)
restore = jax.jit(formats.restore, static_argnums=2)


def meaning(rows, dtype):
    """Return the decoded values of stored rows."""
    return np.asarray(restore(*quantize(rows, dtype), dtype))


LATENT = dict(num_kv_heads=1, values_in_keys=True)
KINDS = {
    "int8": dict(dtype="int8"),
    "fp8": dict(dtype="fp8"),
    "float8_e5m2": dict(dtype="float8_e5m2"),
    "int4": dict(dtype="int4"),
    "int8 and int4": dict(dtype="int8", value_dtype="int4"),
    "int8 latent": dict(dtype="int8", **LATENT),
    "int4 latent": dict(dtype="int4", **LATENT),
    "bfloat16 latent": dict(dtype="bfloat16", **LATENT),
}


def make_config(**changes):
    sizes = dict(
        num_layers=2,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        value_head_dim=VALUE_DIM,
    )
    return small_config(**(sizes | changes))


def random_rows(cache, num_rows, seed=0):
    """Draw keys and values whose rows differ by six orders of magnitude."""
    rng = np.random.default_rng(seed)

    def rows(width):
        shape = (num_rows, cache.num_kv_heads, width)
        sizes = 10.0 ** rng.uniform(-3, 3, (*shape[:2], 1))
        return (rng.standard_normal(shape) * sizes).astype(np.float32)

    keys = rows(cache.head_dim)
    if cache.storage[0].value_pool is None:
        return keys, None
    return keys, rows(cache.value_head_dim)


def filled(kind, lengths=(9, 6), **changes):
    """Return a cache with sequences of random contents."""
    cache = jkv.init(make_config(**(KINDS[kind] | changes)))
    cache, opened = allocate(cache, [0] * len(lengths))
    cache, step = append(cache, opened.seq_ids, lengths)
    jkv.raise_for_status(step.status)
    for layer in range(cache.num_layers):
        rows = random_rows(cache, 16, seed=layer)
        cache = jkv.write(cache, layer, step.batch, *rows)
    return jkv.commit(cache, step.batch)


def contents(cache, seq_id):
    """Return all that `read` returns for a sequence, as bytes."""
    found = [jkv.read(cache, layer, seq_id) for layer in range(cache.num_layers)]
    assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in found[0][:2])
    assert found[0][0][:1].any()
    return [np.asarray(array).tobytes() for arrays in found for array in arrays]


class TestRows:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_decode_within_half_a_step(self, dtype):
        dtype = jnp.dtype(dtype)
        keys, _ = random_rows(jkv.init(make_config()), 500)
        back = np.asarray(restore(*quantize(keys, dtype), dtype))
        largest = np.max(np.abs(keys), axis=-1, keepdims=True)
        reach = largest if dtype == jnp.int8 else np.abs(keys)
        # A scale rounded up widens int8 steps by up to 2**-7; fp8 has subnormals.
        step = HALF_STEP[dtype.name] * (1 + 2.0**-7) * reach
        tiny = 0 if dtype == jnp.int8 else float(jnp.finfo(dtype).smallest_subnormal)
        step += tiny / largest_number(dtype) * largest
        assert (np.abs(back - keys) <= step).all()
        # The bound is nearly reached.
        assert np.max(np.abs(back - keys) / step) > 0.85

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.one_end
    def test_use_the_range_without_overflow(self, dtype):
        dtype = jnp.dtype(dtype)
        keys, _ = random_rows(jkv.init(make_config()), 500)
        elements, scales = quantize(keys, dtype)
        numbers = np.asarray(restore(elements, None, dtype), np.float32)
        most = np.abs(numbers).max(axis=-1)
        limit = largest_number(dtype)
        assert most.max() <= limit and most.min() >= limit * 0.9
        largest = np.abs(np.asarray(keys)).max(axis=-1)
        rounded = np.asarray(scales).view(jnp.bfloat16).astype(np.float32)
        exact = largest / limit
        assert (rounded >= exact * (1 - 1e-6)).all()
        assert (rounded <= exact * (1 + 2.0**-7)).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.one_end
    def test_of_zeros_stay_zeros(self, dtype):
        dtype = jnp.dtype(dtype)
        rows = np.zeros((3, 1, 8), np.float32)
        assert not restore(*quantize(rows, dtype), dtype).any()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
    @pytest.mark.one_end
    def test_that_are_not_finite_decode_as_not_finite(self, dtype, poison):
        """Quantization hides no NaN or infinity, and affects no other row."""
        dtype = jnp.dtype(dtype)
        rows = np.ones((600, 1, 8), np.float32)  # over 4,096 numbers
        rows[1, 0, 4] = poison
        for given in (rows[:3], rows):
            back = np.asarray(restore(*quantize(given, dtype), dtype))
            assert np.isnan(back[1]).all()
            assert np.isfinite(np.delete(back, 1, axis=0)).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", [1e-37, 1e-30, 3e38])
    @pytest.mark.one_end
    def test_of_any_size(self, dtype, size):
        dtype = jnp.dtype(dtype)
        rows = np.full((1, 1, 8), size, np.float32)
        back = np.asarray(restore(*quantize(rows, dtype), dtype), np.float64)
        np.testing.assert_allclose(back, size, rtol=0.1)


class TestContents:
    @pytest.mark.parametrize("kind", few(KINDS, "fp8", "int8 and int4"))
    def test_read_returns_the_written_values(self, kind):
        cache = filled(kind)
        for layer in range(cache.num_layers):
            keys, values, length = jax.device_get(jkv.read(cache, layer, 1))
            wrote = random_rows(cache, 16, seed=layer)
            expected = np.asarray(
                restore(*quantize(wrote[0], cache.dtype), cache.dtype)
            )
            np.testing.assert_array_equal(keys[:6], expected[9:15])
            if wrote[1] is None:
                np.testing.assert_array_equal(values, keys[..., :VALUE_DIM])
            else:
                dtype = cache.storage[0].value_dtype
                expected = np.asarray(restore(*quantize(wrote[1], dtype), dtype))
                np.testing.assert_array_equal(values[:6], expected[9:15])
            assert not keys[6:].any() and not values[6:].any() and length == 6
            block, offset = jax.device_get(jkv.slots(cache, 1, 5))
            key, value = jkv.read_slot(cache, layer, block[0], offset[0])
            np.testing.assert_array_equal(key, keys[5])
            np.testing.assert_array_equal(value, values[5])

    @pytest.mark.parametrize("kind", dealt(KINDS))
    @pytest.mark.one_end
    def test_move_with_their_blocks(self, kind, tmp_path):
        """fork, reorder, truncate, compact, resize, swap and save keep all bits."""
        cache = filled(kind, record_tokens=True)
        before = [contents(cache, 0), contents(cache, 1)]
        cache, forked = fork(cache, [1, 0])
        children = forked.seq_ids.tolist()
        assert [contents(cache, i) for i in children] == before[::-1]
        cache, _ = reorder(cache, children, children[::-1])
        assert [contents(cache, i) for i in children] == before
        cache, _ = free(cache, 0)
        cache = jkv.resize(jkv.compact(cache), 11)
        assert [contents(cache, i) for i in children] == before
        other, back = jkv.swap_in(
            jkv.init(make_config(**KINDS[kind], record_tokens=True)),
            jkv.swap_out(cache, children)[1],
        )
        jkv.raise_for_status(back.status)
        assert [contents(other, i) for i in back.seq_ids.tolist()] == before
        path = tmp_path / "cache.safetensors"
        jkv.save(path, cache)
        loaded = jkv.load(path)
        for one, same in zip(
            jax.tree.leaves(cache), jax.tree.leaves(loaded), strict=True
        ):
            np.testing.assert_array_equal(one, same)
        assert (loaded.dtype, loaded.value_head_dim) == (cache.dtype, VALUE_DIM)
        assert loaded.storage[0].value_dtype == cache.storage[0].value_dtype
        jkv.save(path, cache, children)
        loaded, back = jkv.load(
            path, jkv.init(make_config(**KINDS[kind], record_tokens=True))
        )
        assert [contents(loaded, i) for i in back.seq_ids.tolist()] == before
        jkv.check(loaded)

    @pytest.mark.one_end
    def test_files_are_readable_by_safetensors(self, tmp_path):
        """Elements and scales have names and dtypes of the file format."""
        safetensors = pytest.importorskip("safetensors")
        names = {
            "int8": "I8",
            "fp8": "F8_E4M3",
            "float8_e4m3fnuz": "F8_E4M3FNUZ",
            "float8_e5m2": "F8_E5M2",
            "int4": "U8",
        }
        for dtype, name in names.items():
            path = tmp_path / dtype
            jkv.save(path, jkv.init(make_config(dtype=dtype)))
            with safetensors.safe_open(path, "numpy") as file:
                assert file.get_slice("storage.0.key_pool").get_dtype() == name
                assert file.get_slice("storage.0.key_scales").get_dtype() == "BF16"
            assert jkv.load(path).dtype == make_config(dtype=dtype).dtype

    @pytest.mark.parametrize("array", ["key_pool", "key_scales", "value_scales"])
    @pytest.mark.one_end
    def test_the_comparison_can_fail(self, array):
        cache = filled("int8")
        before, storage = contents(cache, 0), cache.storage[0]
        shifted = jnp.asarray(np.roll(np.asarray(storage.arrays[array]), 1, axis=1))
        other = cache.with_group_storage(0, storage.with_arrays({array: shifted}))
        with pytest.raises(AssertionError):
            assert contents(other, 0) == before

    @pytest.mark.one_end
    def test_another_kind_of_cache_is_refused(self):
        swapped = jkv.swap_out(filled("int8"), 0)[1]
        for kind in ("fp8", "int8 latent", "int8 and int4"):
            with pytest.raises(ValueError, match="dtype of the swapped"):
                jkv.swap_in(jkv.init(make_config(**KINDS[kind])), swapped)

    @pytest.mark.one_end
    def test_missing_scales_break_an_invariant(self):
        cache = filled("int8")
        storage = cache.storage[0]
        for broken in (
            dict(key_scales=None),
            dict(value_scales=storage.value_scales[:, :-1]),
        ):
            with pytest.raises(jkv.InvariantError, match="shapes"):
                jkv.check(cache.with_group_storage(0, storage.with_arrays(broken)))


@pytest.mark.one_end
class TestWrite:
    def test_a_latent_cache_refuses_values(self):
        for kind, fault in (
            ("int8 latent", "omit values"),
            ("int8", "must be an array"),
        ):
            cache = jkv.init(make_config(**KINDS[kind]))
            cache, opened = allocate(cache, 1)
            cache, step = append(cache, opened.seq_ids)
            keys, needed = random_rows(cache, 16)
            values = keys[..., :VALUE_DIM] if needed is None else None
            with pytest.raises(ValueError, match=fault):
                jkv.write(cache, 0, step.batch, keys, values)

    @pytest.mark.parametrize("rows_dtype", [jnp.bfloat16, jnp.float16])
    def test_rows_of_any_float_dtype(self, rows_dtype):
        cache = jkv.init(make_config(dtype="int8"))
        cache, opened = allocate(cache, 1)
        cache, step = append(cache, opened.seq_ids)
        keys = random_rows(cache, 16)[0].astype(rows_dtype)
        values = keys[..., :VALUE_DIM]
        cache = jkv.write(cache, 0, step.batch, keys, values)
        found = np.asarray(jkv.read(cache, 0, 0)[0])[0]
        expected = restore(*quantize(keys, cache.dtype), cache.dtype)[0]
        np.testing.assert_array_equal(found, expected)
