"""Float32 in three terms of bfloat16: exact, and how good products are.

Whole calls are in `test_pallas.py` and `test_kernel_derivative.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.attention.kernel.scores import add_dot, dot_sections
from jkv.attention.kernel.table import Split, Tile
from jkv.attention.kernel.terms import NUM_TERMS, split
from jkv.attention.kernel.variant import Variant

pytestmark = pytest.mark.one_end

# The largest number, one less than a power of two, one more, the smallest with all
# terms normal, zeros.
EDGES = [3.4028235e38, 2 - 2**-23, 1 + 2**-23, 1.2345678e-31, 0.0, -0.0, -1 / 3]


@pytest.fixture(scope="module")
def variant():
    """What `add_dot` looks at."""
    tile = Tile(16, 16, 1, 1, split=Split.BFLOAT16)
    fields = dict.fromkeys((f.name for f in dataclasses.fields(Variant)), None)
    return Variant(**(fields | {"tile": tile, "interpret": True}))


def draw(rng, *sizes):
    """Numbers of a wide range."""
    return (rng.standard_normal(sizes) * 2.0 ** rng.integers(-20, 20, sizes)).astype(
        np.float32
    )


def test_the_terms_of_a_number_are_all_of_it():
    numbers = np.concatenate([draw(np.random.default_rng(0), 1000), EDGES])
    numbers = numbers.astype(np.float32)
    terms = jax.jit(split)(numbers, np.int32(0))
    assert [term.dtype for term in terms] == [jnp.bfloat16] * NUM_TERMS
    found = sum(np.asarray(term, np.float64) for term in terms)
    np.testing.assert_array_equal(found, numbers.astype(np.float64))
    two = sum(np.asarray(term, np.float64) for term in terms[:2])
    assert (two != numbers).any()
    # What is bfloat16 is its only term.
    half = jnp.asarray(numbers, jnp.bfloat16)
    (only,) = jax.jit(split)(half, np.int32(0))
    np.testing.assert_array_equal(only, half)


@pytest.mark.parametrize("kind", ["random", "cancelling", "longest"])
def test_products_are_good_to_21_bits(variant, kind):
    """Of the sum of the products' sizes, as those of float32 are to 24."""
    rng = np.random.default_rng(1)
    one, other = draw(rng, 16, 64), draw(rng, 32, 64)
    if kind == "cancelling":  # nearly all that is added up is taken away again
        one[:, 32:] = -one[:, :32]
        other[:, 32:] = other[:, :32] * np.float32(1 + 2**-20)
    if kind == "longest":  # all bits set: what is left out is largest
        one, other = (np.full_like(each, 2 - 2**-23) for each in (one, other))
    sections = [slice(0, 32), slice(32, 64)]
    ones, others = ([each[:, s] for s in sections] for each in (one, other))
    found = jax.jit(dot_sections, static_argnums=0)(variant, ones, others, np.int32(1))
    exact = one.astype(np.float64) @ other.T.astype(np.float64)
    size = np.abs(one).astype(np.float64) @ np.abs(other).T.astype(np.float64)
    error = np.max(np.abs(found - exact) / size)
    assert error < 2**-21
    if kind == "cancelling":
        return
    # Two terms of each would not do.
    short = (sum(np.asarray(t, np.float64) for t in split(each)[:2]) for each in ones)
    whole = (each.astype(np.float64) for each in others)
    rounded = sum(a @ b.T for a, b in zip(short, whole, strict=True))
    assert np.max(np.abs(rounded - exact) / size) > 2**-20


def test_infinite_numbers_and_nan_stay_what_they_are(variant):
    """Inf less inf is NaN, which the lower terms of a product must not bring in."""
    other = np.eye(16, dtype=np.float32) + 1
    for number in (np.inf, -np.inf, np.nan):
        one = np.ones((16, 16), np.float32)
        one[3, 5] = number
        total = jnp.zeros((16, 16))
        found = jax.jit(add_dot, static_argnums=0)(
            variant, total, one, other, np.int32(1)
        )
        expected = np.full(16, number)
        np.testing.assert_array_equal(found[3], expected)
        np.testing.assert_array_equal(np.delete(found, 3, axis=0), 17)
