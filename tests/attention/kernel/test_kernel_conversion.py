"""Small floats: the kernel's conversion of all codes, and attention over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention.served_shapes import IS_INTERPRETED, Shape, fit

from jkv.attention import paged_attention
from jkv.attention.kernel.bodies.scores import exp2_in_pairs
from jkv.attention.kernel.elements.conversion import round_by_bits
from jkv.attention.kernel.elements.formats import KERNEL_FORMATS
from jkv.formats.scaled import Scaled

pytestmark = pytest.mark.one_end

FORMATS = [jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.float8_e5m2]
# bfloat16 represents all codes exactly, and every GPU multiplies it.
SHAPES = [
    fit(Shape(16, 16, "bfloat16", *2 * [jnp.dtype(each).name])) for each in FORMATS
]
CODES = np.arange(256, dtype=np.uint8)
WORDS = CODES.view(np.int32)


def meaning(kv_dtype):
    """Return the values of all codes by ml_dtypes, f32[256]."""
    return CODES.view(kv_dtype).astype(np.float32)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_operands_equal_the_decoded_codes(kv_dtype):
    """The conversion works by bits, as on a GPU, and interpreted.

    By bits, small e4m3 numbers are temporarily subnormal in float32, which this CPU
    flushes to zero and GPUs do not; and its NaN becomes some number.
    """
    expected = meaning(kv_dtype)
    is_e5m2 = kv_dtype == jnp.float8_e5m2
    small = np.abs(expected) < float(jnp.finfo(kv_dtype).smallest_normal)
    by_bits = ~small | (expected == 0) | is_e5m2
    by_bits &= ~np.isnan(expected) | is_e5m2
    kept = KERNEL_FORMATS[Scaled(jnp.dtype(kv_dtype))]
    functions = (kept.to_operand, CODES), (kept.words_to_operand, WORDS)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        for interpret, mask in ((True, np.full(256, True)), (False, by_bits)):
            for function, stored in functions:
                convert = jax.jit(
                    lambda codes, f=function, d=dtype, i=interpret: f(
                        codes, d, interpret=i
                    )
                )
                found = np.asarray(convert(stored).astype(jnp.float32))
                np.testing.assert_array_equal(found[mask], expected[mask])
    assert np.isfinite(expected).sum() >= 248 and small.sum() >= 8


@pytest.mark.parametrize("interpret", (False, True))
def test_packed_integers_convert_exactly(interpret):
    """The results are in column order."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        convert = KERNEL_FORMATS[Scaled(jnp.dtype("int8"))].words_to_operand
        found = convert(WORDS, dtype, interpret=interpret)
        np.testing.assert_array_equal(found.astype(jnp.float32), CODES.view(np.int8))


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
def test_attention_reads_every_code(implementation):
    """A sequence of one token returns that token's values: 16 codes each."""
    for kv_dtype, (head_dim, *_) in zip(FORMATS, SHAPES, strict=True):
        sequences = 256 // head_dim
        expected = meaning(kv_dtype).reshape(sequences, head_dim)
        # A NaN code may affect the other codes of its token.
        finite = np.where(np.isfinite(expected), expected, 0.0)
        codes = np.where(np.isfinite(expected), CODES.reshape(expected.shape), 0)
        pool = np.zeros((1, sequences, 1, 16, head_dim), np.uint8)
        pool[0, :, 0, 0] = codes
        one_each = jnp.ones(sequences, jnp.int32)
        found = paged_attention(
            jnp.ones((sequences, 1, head_dim), jnp.bfloat16),
            jnp.zeros_like(pool),
            jnp.asarray(pool),
            0,
            jnp.arange(sequences, dtype=jnp.int32)[:, None],
            None,
            jnp.arange(sequences, dtype=jnp.int32),
            one_each,
            one_each,
            kv_dtype=kv_dtype,
            max_query_length=1,
            implementation=implementation,
        )
        np.testing.assert_array_equal(found[:, 0].astype(jnp.float32), finite)


@pytest.mark.parametrize("interpret", (False, True))
def test_exp2_in_pairs_equals_numpy(interpret):
    """Operations run one by one as on a GPU (XLA fuses one away), and interpreted."""

    def power_of(x):
        return np.asarray(exp2_in_pairs(jnp.float32(x), interpret=interpret))

    x = np.linspace(-126.0, 0.0, 10_001, dtype=np.float32)
    error = power_of(x) / np.exp2(x.astype(np.float64)) - 1.0
    assert 1e-7 < np.max(np.abs(error)) < 3e-6
    assert power_of(0.0) == 1.0 and power_of(-126.0) == 2.0**-126
    assert not np.any(power_of([-127.0, -150.0, -5e6, -1e30, -np.inf]))
    if IS_INTERPRETED:
        # XLA on a GPU returns a number; `test_kernel_isolation` tests NaN in kernels.
        with np.errstate(invalid="ignore"):
            assert np.isnan(power_of(np.nan))
    # A subnormal result may have any value, as a 16-bit sum does not change.
    least = power_of(np.linspace(-127.0, -126.0, 1_001))
    assert np.all((least >= 0.0) & (least < 2.1 * 2.0**-126))


def test_rounding_by_bits_is_to_nearest_with_ties_up():
    """Ties round up; NaN stays NaN."""
    exact = np.arange(0x3F000000, 0x3F100000, 1 << 12, np.uint32).view(np.float32)
    rounded = np.asarray(round_by_bits(jnp.asarray(exact)), np.float32)
    nearest = np.asarray(jnp.asarray(exact).astype(jnp.bfloat16), np.float32)
    is_halfway = exact.view(np.uint32) & 0xFFFF == 0x8000
    assert np.array_equal(rounded[~is_halfway], nearest[~is_halfway])
    assert np.all(rounded[is_halfway] > exact[is_halfway]) and np.any(is_halfway)
    assert np.isnan(np.float32(round_by_bits(jnp.float32(np.nan))))
