"""Rows that the kernel rounds to 8 bits: bit-identical to XLA's rounding on CPUs.

On GPUs a few elements differ by one unit, as `jkv.formats.scaled` documents.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import few

from jkv.attention.kernel.elements.rounding import invert, round_row
from jkv.formats.format import STORED_AS
from jkv.formats.scaled import count_units_apart, round_rows


def draw_quotients(dtype, random):
    """Draw rows with elements at and near the midpoints of two numbers."""
    numbers = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    numbers = np.unique(np.abs(numbers[np.isfinite(numbers)]))
    middles = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    scales = random.integers(128, 256, (64, 1)) * 2.0 ** random.integers(
        -40, 40, (64, 1)
    )
    rows = np.float32(random.choice(middles, (64, 256)) * scales)
    beside = random.integers(-2, 3, rows.shape).astype(np.int32)
    rows = np.abs((rows.view(np.int32) + beside).clip(0).view(np.float32))
    rows[:, 0] = numbers[-1] * scales[:, 0]  # sets the scale
    return rows * random.choice(np.float32([-1, 1]), rows.shape)


BYTES = ["int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"]


@pytest.mark.parametrize("name", few(BYTES, "int8"))
def test_rounding_equals_xla(name):
    """Elements and scales, for ties, NaN, small and large rows."""
    dtype, random = jnp.dtype(name), np.random.default_rng(0)
    rows = draw_quotients(dtype, random)
    any_bits = random.integers(0, 2**32, (64, 256), np.uint32)
    any_bits[:32] &= 0xBFFFFFFF  # half of the rows without large numbers
    any_bits = any_bits.view(np.float32)
    spread = np.float32(2.0) ** random.integers(-149, 127, (64, 1), np.int32)
    spread = spread * np.float32(random.standard_normal((64, 256)))
    zeros = np.float32([[0.0] * 256, [-0.0] * 256, [1.0, -0.0] * 128])
    rows = np.concatenate([rows, any_bits, np.float32(spread), zeros])

    def by_kernel(row):
        rounded = round_row([row[:128], row[128:]], dtype)
        return jnp.concatenate(rounded.elements), rounded.scale

    def by_xla(rows):
        return [
            jax.lax.bitcast_convert_type(each, bits)
            for each, bits in zip(
                round_rows(rows, dtype), (STORED_AS[dtype], jnp.uint16), strict=True
            )
        ]

    found = jax.jit(jax.vmap(by_kernel))(rows)
    wanted = jax.jit(by_xla)(rows)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
    (elements, scales), (others, other_scales) = jax.device_get((found, wanted))
    np.testing.assert_array_equal(scales, other_scales)
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(elements, others)
    else:
        apart = count_units_apart(elements, others, dtype)
        assert apart.max() <= 1 and np.mean(apart > 0) <= 1e-3
    assert len(np.unique(np.asarray(wanted[0]))) > 200


@pytest.mark.one_end
def test_inverses_are_rounded_to_nearest():
    """For every possible scale of a row."""
    bits = np.arange(0x0080, 0x7C80, dtype=np.int32) << 16
    found = np.asarray(jax.jit(jax.vmap(invert))(bits))
    exact = 1 / bits.view(np.float32).astype(np.float64)
    np.testing.assert_array_equal(found, np.float32(exact))


@pytest.mark.one_end
@pytest.mark.parametrize("name", BYTES)
def test_units_apart_counts_the_numbers_between(name):
    """Neighbours are one apart, also across zero; the two zeros are zero apart."""
    dtype = jnp.dtype(name)
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    numbers = codes.astype(np.float32)
    finite = np.isfinite(numbers)
    order = np.argsort(numbers[finite], kind="stable")
    codes = codes[finite][order].view(STORED_AS[dtype])
    steps = count_units_apart(codes[1:], codes[:-1], dtype)
    np.testing.assert_array_equal(steps, np.diff(numbers[finite][order]) > 0)
    whole = count_units_apart(codes[:1], codes[-1:], dtype)
    assert whole == len(np.unique(numbers[finite])) - 1
