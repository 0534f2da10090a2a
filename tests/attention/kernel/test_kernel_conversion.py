"""All codes of the small floats: the kernel's conversion, and each implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.attention import paged_attention
from jkv.attention.kernel.conversion import to_operand

pytestmark = pytest.mark.one_end

FORMATS = [jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.float8_e5m2]
CODES = np.arange(256, dtype=np.uint8)


def meaning(kv_dtype):
    """What the codes mean, by ml_dtypes: f32[256]."""
    return CODES.view(kv_dtype).astype(np.float32)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_operands_are_what_the_codes_mean(kv_dtype):
    """By bits, as on a card, and as interpreted.

    By bits e4m3's small numbers are subnormal ones of float32 for a while, which this
    processor takes for zero and cards do not; and its NaN comes out as some number.
    """
    expected = meaning(kv_dtype)
    is_e5m2 = kv_dtype == jnp.float8_e5m2
    small = np.abs(expected) < float(jnp.finfo(kv_dtype).smallest_normal)
    by_bits = ~small | (expected == 0) | is_e5m2
    by_bits &= ~np.isnan(expected) | is_e5m2
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        for interpret, mask in ((True, np.full(256, True)), (False, by_bits)):
            convert = jax.jit(
                lambda codes, d=dtype, i=interpret: to_operand(
                    codes, jnp.dtype(kv_dtype), d, interpret=i
                )
            )
            found = np.asarray(convert(CODES).astype(jnp.float32))
            np.testing.assert_array_equal(found[mask], expected[mask])
    assert np.isfinite(expected).sum() >= 248 and small.sum() >= 8


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
def test_attention_reads_every_code(implementation):
    """A sequence of one token returns that token's values: 16 codes each."""
    sequences, head_dim = 16, 16
    for kv_dtype in FORMATS:
        expected = meaning(kv_dtype).reshape(sequences, head_dim)
        # A code that is no number may spoil the others of its token.
        finite = np.where(np.isfinite(expected), expected, 0.0)
        codes = np.where(np.isfinite(expected), CODES.reshape(expected.shape), 0)
        pool = np.zeros((1, sequences, 1, 16, head_dim), np.uint8)
        pool[0, :, 0, 0] = codes
        one_each = jnp.ones(sequences, jnp.int32)
        found = paged_attention(
            # bfloat16 holds all codes exactly, and every card multiplies it.
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
