"""int4: rows are rotated and rounded; attention equals that over decoded rows."""

import dataclasses
import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import few, further
from support.models.small_attention_model import attention_model, attention_params
from support.paths import ROOT
from support.small_caches import small_config
from support.tolerances import assert_close, is_close

import jkv
from jkv.formats.table import COSTS, FORMATS

INT4 = FORMATS[np.dtype(jnp.int4)]
store = jax.jit(lambda rows: INT4.put(INT4.prepare(rows)))
restore = jax.jit(INT4.read)
WIDTHS = [2, 6, 16, 64, 96, 576]


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def error_of(found, rows):
    """Return the mean squared error, relative to the mean square."""
    return float(np.mean((np.asarray(found) - rows) ** 2) / np.mean(rows**2))


@pytest.mark.one_end
@pytest.mark.parametrize("width", few(WIDTHS, 6, 64))
def test_rotation_keeps_products_and_is_invertible(width):
    rows, others = draw(2, 5, width)
    rotated, again = (np.asarray(jax.jit(INT4.rotate)(each)) for each in (rows, others))
    np.testing.assert_allclose((rotated * again).sum(-1), (rows * others).sum(-1), 1e-4)
    np.testing.assert_allclose(jax.jit(INT4.rotate_back)(rotated), rows, atol=1e-5)
    assert np.abs(rotated - rows).max() > 0.5
    # Both a constant row and a single element are spread over the block.
    for one in (np.ones(width), np.eye(width)[0]):
        alike = np.asarray(jax.jit(INT4.rotate)(np.float32(one)[None]))
        block = width & -width
        assert np.square(alike).max() <= 2 * np.square(one).sum() / min(block, width)


@pytest.mark.one_end
def test_stored_bytes_by_hand():
    """Files depend on it: steps, the order in a byte, signs and transform."""
    # A row (8, 0, 0, 0) is rotated to four elements of 4, the largest: 15.
    stored = store(np.float32([[8, 0, 0, 0]]))
    np.testing.assert_array_equal(stored["pool"], [[0xFF, 0xFF]])
    # (4, 0, 4, 0) becomes 4, 4, 0, 0; zero is between two steps and takes the upper
    # one.
    stored = store(np.float32([[4, 0, 4, 0]]))
    np.testing.assert_array_equal(stored["pool"], [[0x8F, 0x8F]])
    # The fourth sign is negative: its column of the transform is negated.
    stored = store(np.float32([[0, 0, 0, 8]]))
    np.testing.assert_array_equal(stored["pool"], [[0xF0, 0x0F]])


@pytest.mark.one_end
@pytest.mark.parametrize("width", [64, 32])
def test_parts_of_a_row_are_bit_fields_of_units(width):
    """Four in two bytes if 64 divides the width, else two in one."""
    rotated = jnp.asarray(draw(1, width))
    stored = jax.jit(INT4.put)(rotated)
    unit, parts = (np.uint16, 4) if width == 64 else (np.uint8, 2)
    units = np.asarray(stored["pool"]).view(unit)
    steps = [(units >> 4 * part) & 15 for part in range(parts)]
    scale = np.asarray(stored["scales"]).view(jnp.bfloat16).astype(np.float32)
    wanted = np.clip(np.floor(rotated / scale[:, None]) + 8, 0, 15)
    np.testing.assert_array_equal(np.concatenate(steps, axis=1), wanted)
    numbers, factor = jax.jit(INT4.get)(stored)
    np.testing.assert_array_equal(numbers, wanted - 7.5)
    np.testing.assert_array_equal(factor, scale)


@pytest.mark.one_end
def test_int4_errors_are_near_a_16_level_normal_quantizer():
    """Rows with large channels, for which plain 4-bit steps fail, are included.

    16 levels of a normal up to the largest number have 0.0081.
    """
    rows = draw(2000, 2, 64)
    large = rows * np.where(np.arange(64) % 16, 1, 20).astype(np.float32)
    for each, most in ((rows, 0.0093), (large, 0.0093)):
        error = error_of(restore(store(each)), each)
        assert 0.004 < error < most
    steps = np.abs(large).max(-1, keepdims=True) / 7
    plain = np.round(large / steps) * steps
    small = np.arange(64) % 16 != 0
    found = np.asarray(restore(store(large)))
    assert error_of(plain[..., small], large[..., small]) > 0.7
    assert error_of(found[..., small], large[..., small]) < 0.5


@pytest.mark.one_end
def test_a_rows_bits_do_not_depend_on_other_rows():
    rows = draw(7, 2, 96)
    together = store(rows)
    for i in range(7):
        alone = store(rows[i : i + 1])
        for name, array in together.items():
            np.testing.assert_array_equal(array[i : i + 1], alone[name])


@pytest.mark.one_end
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_non_finite_rows_decode_as_non_finite(poison):
    rows = np.ones((600, 1, 8), np.float32)
    rows[1, 0, 4] = poison
    found = np.asarray(restore(store(rows)))
    assert np.isnan(found[1]).all() and np.isfinite(np.delete(found, 1, 0)).all()
    assert not np.asarray(restore(store(0 * rows[2:]))).any()


@pytest.mark.one_end
@pytest.mark.parametrize("width", few([32, 64, 96, 576], 64))
def test_large_finite_rows_decode_like_small_ones(width):
    """Sums of a row's elements, and rotated elements, may exceed float32."""
    rows, factor = np.clip(draw(20, 2, width), -2, 2), np.float32(2.0**125)
    found = np.asarray(restore(store(rows)))
    large = np.asarray(restore(store(rows * factor)))
    np.testing.assert_array_equal(large / factor, found)
    # A row of the transform is rotated into a single element, which saturates.
    one = np.where(np.asarray(INT4.rotate_back(jnp.eye(1, width))) < 0, -3e38, 3e38)
    stored = store(np.float32(one))
    assert np.isfinite(np.asarray(stored["scales"].view(jnp.bfloat16), np.float32))
    assert np.isfinite(np.asarray(restore(stored))).all()


@pytest.mark.one_end
@pytest.mark.parametrize("dtype", ["int4", *further(["int8", "float8_e4m3fn"])])
def test_a_large_row_does_not_affect_later_rows(dtype):
    """Values of one token are 1e38: they, and the other tokens' outputs, are finite."""
    config = small_config(**SIZES, dtype=dtype)
    queries, keys, values = draw(9, 4, 32), draw(9, 2, 32), draw(9, 2, 32, seed=1)
    values[2] *= np.float32(1e38)
    values = np.clip(values, -2e38, 2e38)
    _, found, _ = play(config, queries, keys, values)
    for output, _, _ in found:
        assert np.isfinite(np.asarray(output)).all()
        assert (np.abs(np.asarray(output)[7:]) < 10).all()


KINDS = {
    "int8 and int4": dict(dtype="int8", value_dtype="int4"),
    "int4 and float32": dict(dtype="int4", value_dtype="float32"),
    "int4": dict(dtype="int4"),
    "latent": dict(dtype="int4", values_in_keys=True),
}
SIZES = dict(num_kv_heads=2, head_dim=32, value_head_dim=32)


@functools.partial(jax.jit, static_argnums=0)
def play(config, queries, keys, values):
    """Write seven and two tokens; return decoded rows and each backend's results."""
    cache, opened = jkv.allocate(jkv.init(config), [0, 0])
    cache, batch = jkv.append(cache, opened.seq_ids, [7, 2], capacity=9)
    cache = jkv.write(cache, 0, batch, keys, values)

    def attend(queries, implementation=None):
        options = dict(return_lse=True, implementation=implementation)
        return jkv.attend(cache, 0, batch, queries, **options)

    def loss(queries, implementation):
        output, lse = attend(queries, implementation)
        return jnp.sum(jnp.sin(output)) + jnp.sum(lse)

    ways = [None, "xla", "reference"]
    if config.dtype != jnp.int4 or config.values_in_keys:
        ways.append("pallas")  # its derivative does not combine bits and floats
    found = [(*attend(queries, way), jax.grad(loss)(queries, way)) for way in ways]
    read = [jkv.read(cache, 0, i) for i in (0, 1)]
    return read, found, cache


@pytest.mark.further
@pytest.mark.newest_further
@pytest.mark.parametrize("kind", few(KINDS, "int8 and int4"))
def test_attention_equals_float32_over_decoded_rows(kind):
    """Its gradient equals that of a float32 cache of the decoded numbers."""
    config = small_config(**SIZES, **KINDS[kind])
    queries, keys, values = draw(9, 4, 32), draw(9, 2, 32), draw(9, 2, 32, seed=1)
    given = keys, None if config.values_in_keys else values
    read, found, cache = play(config, queries, *given)
    kept = [jnp.concatenate([read[0][i][:7], read[1][i][:2]]) for i in (0, 1)]
    plain = dataclasses.replace(
        config, dtype="float32", value_dtype=None, values_in_keys=False
    )
    _, wanted, _ = play(plain, queries, *kept)
    _, given, _ = play(plain, queries, keys, values)
    for one, other in zip(found, wanted, strict=False):
        for mine, theirs in zip(one, other, strict=True):
            assert_close(mine, theirs)
    assert not is_close(given[0][0], wanted[0][0])
    assert config.bytes == cache.nbytes
    jkv.check(cache)


@pytest.mark.one_end
def test_a_cache_warns_about_int4_keys():
    sizes = dict(num_kv_heads=1, head_dim=16)
    config = small_config(**sizes, dtype="int4")
    with pytest.warns(UserWarning, match="dtype='int8', value_dtype='int4'"):
        jkv.init(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jkv.init(config, storage=False)
        jkv.init(small_config(**sizes, dtype="int8", value_dtype="int4"))
        jax.eval_shape(lambda: jkv.init(config))


@pytest.mark.one_end
def test_documented_format_costs_equal_measurements():
    path = ROOT / "benchmarks" / "results" / "accuracy.json"
    rows = json.loads(path.read_text())["runs"][-1]["models"]
    for (key, value), costs in COSTS.items():
        name = key if key == value else f"{key} keys, {value} values"
        ratios = [row["by float32"] for row in rows if row["cache"] == name]
        assert [round(100 * (ratio - 1), 1) for ratio in ratios] == [*costs]


@pytest.mark.one_end
def test_raw_pools_need_an_encoding_dtype():
    parts = store(draw(4, 2, 4, 32)), store(draw(4, 2, 4, 24, seed=1))
    one = jnp.ones(1, jnp.int32)
    pools = parts[0]["pool"], parts[1]["pool"]
    requests = None, jnp.array([[2, 1]]), None, 0 * one, one, 5 * one
    scales = {"key_scales": parts[0]["scales"], "value_scales": parts[1]["scales"]}
    attend = functools.partial(
        jkv.paged_attention, jnp.asarray(draw(1, 4, 32)), *pools, *requests
    )
    wanted = attend(kv_dtype="int4", **scales)
    assert wanted.shape == (1, 4, 24)
    floats = functools.partial(
        jkv.paged_attention,
        jnp.asarray(draw(1, 4, 32)),
        *map(restore, parts),
        *requests,
    )
    assert_close(wanted, floats())
    mixed = jkv.paged_attention(
        jnp.asarray(draw(1, 4, 32)),
        restore(parts[0]),
        pools[1],
        *requests,
        value_dtype="int4",
        value_scales=scales["value_scales"],
    )
    assert_close(mixed, wanted)
    with pytest.raises(ValueError, match="pass kv_dtype=.*int4"):
        attend(**scales)
    with pytest.raises(ValueError, match="key_scales must be given"):
        attend(kv_dtype="int4")


@pytest.mark.one_end
def test_score_uses_float32_for_every_storage_dtype():
    sizes = dict(num_layers=2, num_kv_heads=2, head_dim=4)
    params = attention_params()
    found = [
        jkv.score(attention_model, params, [[1, 2]], [[3, 4]], config=config)
        for config in (
            small_config(**sizes, dtype="int8", value_dtype="int4"),
            small_config(**sizes, dtype="float32"),
        )
    ]
    np.testing.assert_array_equal(*found)
